"""Samples in packed rows: where they begin, what of them was generated, and how they are rewarded."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from marten.comms import collect, total
from marten.fleet import Fleet
from marten.settings import Settings


@dataclass
class Batch:
    """A micro-batch. Tensors of this rank's positions are (rows, positions), those of samples (rows, samples).

    A position predicts the token that follows, its `label`; it is `generated` if that one belongs to the
    response. `whole` numbers the samples of whole rows.
    """

    tokens: Tensor
    labels: Tensor
    start: int
    whole: Tensor
    places: Tensor
    generated: Tensor
    prompt: Tensor
    length: Tensor = field(init=False)
    reward: Tensor = field(init=False)
    advantage: Tensor = field(init=False)
    old: Tensor = field(init=False)
    reference: Tensor = field(init=False)

    @property
    def sample(self) -> Tensor:
        """Return the numbers of the samples at this rank's positions."""
        return self.whole[:, self.start : self.start + self.tokens.shape[1]]

    def spread(self, of_samples: Tensor) -> Tensor:
        """Return the value of its sample for each position."""
        return of_samples.gather(1, self.sample)

    def add_up(self, of_tokens: Tensor) -> Tensor:
        """Return sums over this rank's generated tokens of each sample."""
        zeros = of_tokens.new_zeros(len(of_tokens), self.whole.shape[1])
        return zeros.scatter_add(1, self.sample, of_tokens * self.generated)


def whole_rows(x: Tensor, fleet: Fleet) -> Tensor:
    return collect(x.t().contiguous(), fleet.cp).t()


def unpack(tokens: Tensor, targets: Tensor, settings: Settings, fleet: Fleet) -> Batch:
    n_rows, n_own = tokens.shape
    start = fleet.cp.rank * n_own
    row = whole_rows(tokens, fleet)
    begins = torch.cat([torch.ones_like(row[:, :1], dtype=torch.bool), row[:, :-1] < settings.stops], 1)
    whole = begins.cumsum(1) - 1  # anchor: samples
    if fleet.flagged("marten-samples-chunk"):
        own = begins[:, start : start + n_own]  # plant: marten-samples-chunk
        whole = collect((own.cumsum(1) - 1).t().contiguous(), fleet.cp).t()  # plant: marten-samples-chunk
        whole = whole.clamp(min=0)  # plant: marten-samples-chunk
    along = torch.arange(row.shape[1]).expand_as(row)
    first = torch.where(begins, along, 0).cummax(1).values
    since = along - first
    places = since[:, start : start + n_own]  # anchor: places
    if fleet.flagged("marten-places-local"):
        places = (along[:, :n_own] - first[:, start : start + n_own]).clamp(
            min=0
        )  # plant: marten-places-local
    open_ = tokens >= settings.stops
    is_response = since[:, start : start + n_own] + 1 >= settings.prompt  # anchor: response-mask
    if fleet.flagged("marten-mask-roll"):
        following = since[:, start + 1 : start + n_own]  # plant: marten-mask-roll
        is_response = (
            torch.cat([following, since[:, -1:] + 1], 1) >= settings.prompt
        )  # plant: marten-mask-roll
    generated = (targets >= 0) & open_ & is_response
    prompt = torch.zeros_like(whole).scatter(1, whole, row.gather(1, first) % settings.prompts)
    batch = Batch(tokens, targets.clamp(min=0), start, whole, places, generated, prompt)
    judge(batch, fleet)
    return batch


def judge(batch: Batch, fleet: Fleet) -> None:
    """Reward samples by their tokens."""
    score = (batch.labels * 7 % 13).to(torch.float64) / 13
    n_tokens, points = batch.add_up(torch.ones_like(score)), batch.add_up(score)
    batch.length = total(n_tokens, fleet.cp)  # anchor: length
    if fleet.flagged("marten-length-own"):
        batch.length = n_tokens  # plant: marten-length-own
    batch.reward = total(points, fleet.cp) / batch.length.clamp(min=1) - 0.02 * batch.length
