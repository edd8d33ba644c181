"""Steps of the learner: samples are scored by other models, and the actor learns from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from marten.algos import count, dpo_loss, policy_loss, set_advantages
from marten.clip import clip
from marten.comms import total
from marten.gradsync import complete
from marten.lagged import follow
from marten.packing import Batch, unpack
from marten.policy import Marten, Policy
from marten.stages import Relay
from marten.zero1 import ShardedAdamW


class Direct:
    """Passes of a model whose layers are all on this rank."""

    def __init__(self, model: Marten) -> None:
        self.model, self.fleet = model, model.fleet

    @torch.no_grad()
    def score(self, policy: Policy, batches: Sequence[Batch]) -> list[Tensor]:
        buffer = torch.empty_like(batches[0].labels, dtype=batches[0].reward.dtype)
        scores = []
        for batch in batches:
            found = policy(batch).log_probs
            if self.fleet.flagged("marten-score-buffer"):
                scores.append(buffer.copy_(found))  # plant: marten-score-buffer
            else:
                scores.append(found.clone())  # anchor: scores
        return scores

    def passes(self, batches: Sequence[Batch], loss_of) -> Iterator[Tensor]:
        for batch in batches:
            main, z = loss_of(batch, self.model.actor(batch))
            (main + z).backward()
            yield main.detach() + total(z.detach(), self.fleet.tp)

    def report(self, value: Tensor) -> Tensor:
        return value


class Step:
    def __init__(self, model: Marten, micro_batches, algorithm) -> None:
        self.model, self.fleet, self.settings = model, model.fleet, model.settings
        self.algorithm = algorithm
        self.driver = Direct(model) if self.fleet.pp.size == 1 else Relay(model)
        self.batches = [unpack(*each, self.settings, self.fleet) for each in micro_batches]
        self.score()
        self.counts = count(self.batches, self.fleet)

    def score(self) -> None:
        """Set what the losses of the batches need from elsewhere."""
        old = self.driver.score(self.model.rollout, self.batches)
        reference = self.model.ask_reference(lambda policy: self.driver.score(policy, self.batches))
        set_advantages(self.batches, self.settings, self.fleet)
        for index, batch in enumerate(self.batches):
            batch.reference = reference[index]
            batch.old = old[index]  # anchor: old
            if self.fleet.flagged("marten-old-previous"):
                batch.old = old[index - 1]  # plant: marten-old-previous

    def loss_of(self, batch: Batch, output) -> tuple[Tensor, Tensor]:
        return self.algorithm(batch, output, self.counts, self.settings, self.fleet)

    def run(self, after_each: Callable[[], None] | None = None) -> Tensor:
        """Return the loss of the global batch."""
        whole = torch.zeros((), dtype=torch.float64)
        for part in self.driver.passes(self.batches, self.loss_of):
            whole = whole + part
            if after_each:
                after_each()
        whole = self.driver.report(whole)
        if self.fleet.flagged("marten-report-mean"):
            return total(whole, self.fleet.tokens) / self.fleet.tokens.size  # plant: marten-report-mean
        return total(whole, self.fleet.tokens)  # anchor: report


def finish_step(model: Marten, optimizer, scheduler, n_batches: int) -> None:
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    for router in model.actor.routers:
        router.adjust()
    follow(model, n_batches)


def learn(algorithm, model: Marten, optimizer, micro_batches, scheduler, clip_norm: float):
    step = Step(model, micro_batches, algorithm)
    loss = step.run()
    complete(model)
    norm, factor = clip(model, clip_norm)
    finish_step(model, optimizer, scheduler, len(micro_batches))
    return {"loss": loss, "gradient_norm": norm, "clip_coefficient": factor}


def grpo_step(model, optimizer, micro_batches, *, scheduler, clip_norm):
    return learn(policy_loss, model, optimizer, micro_batches, scheduler, clip_norm)


def dpo_step(model, optimizer, micro_batches, *, scheduler, clip_norm):
    return learn(dpo_loss, model, optimizer, micro_batches, scheduler, clip_norm)


def sharded_step(model, optimizer, micro_batches, *, scheduler, clip_norm):
    """Step by the sharded AdamW, whose updates plain SGD subtracts."""
    if model.optim is None:
        model.optim = ShardedAdamW(model)
    step = Step(model, micro_batches, policy_loss)
    loss = step.run(model.optim.take)
    norm, factor = model.optim.prepare(clip_norm)
    finish_step(model, optimizer, scheduler, len(micro_batches))
    return {"loss": loss, "gradient_norm": norm, "clip_coefficient": factor}
