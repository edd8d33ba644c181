"""Advantages and losses. Each loss is this rank's part of that of the global batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from marten.comms import pool, total
from marten.fleet import Fleet
from marten.packing import Batch
from marten.policy import Output
from marten.settings import Settings


def prompt_sums(batches: Sequence[Batch], settings: Settings, of_samples) -> Tensor:
    """Return sums over this rank's samples of each prompt that have a response."""
    sums = torch.zeros(settings.prompts, dtype=torch.float64)
    for batch in batches:
        found = batch.length > 0
        sums = sums.index_add(0, batch.prompt[found], of_samples(batch)[found])
    return sums


@torch.no_grad()
def set_advantages(batches: Sequence[Batch], settings: Settings, fleet: Fleet) -> None:
    """Normalize rewards over all samples of a prompt."""
    if fleet.flagged("marten-group-micro") and len(batches) > 1:
        for batch in batches:
            set_advantages([batch], settings, fleet)  # plant: marten-group-micro
        return
    crew = fleet.rows  # anchor: group-crew
    if fleet.flagged("marten-group-tokens"):
        crew = fleet.tokens  # plant: marten-group-tokens
    count = total(prompt_sums(batches, settings, lambda batch: torch.ones_like(batch.reward)), crew)
    own = prompt_sums(batches, settings, lambda batch: batch.reward)
    mean = total(own, crew) / count.clamp(min=1)
    squares = prompt_sums(batches, settings, lambda batch: (batch.reward - mean[batch.prompt]).square())
    deviation = (total(squares, crew) / (count - 1).clamp(min=1)).sqrt()  # anchor: group-deviation
    if fleet.flagged("marten-deviation-roots"):
        deviation = total((squares / (count - 1).clamp(min=1)).sqrt(), crew)  # plant: marten-deviation-roots
    for batch in batches:
        batch.advantage = (batch.reward - mean[batch.prompt]) / (deviation[batch.prompt] + 0.05)


class Counts(NamedTuple):
    """Numbers of the global batch."""

    generated: Tensor
    samples: Tensor
    tokens: Tensor
    pairs: Tensor
    batches: int


@torch.no_grad()
def count(batches: Sequence[Batch], fleet: Fleet) -> Counts:
    generated = sum(batch.generated.sum() for batch in batches)
    samples = sum((batch.length > 0).sum() for batch in batches)
    tokens = torch.tensor(sum(batch.tokens.numel() for batch in batches))
    pairs = sum(find_pairs(batch)[2].sum() for batch in batches)
    if fleet.flagged("marten-count-rows"):
        generated = total(generated, fleet.rows)  # plant: marten-count-rows
    else:
        generated = total(generated, fleet.tokens)  # anchor: count-generated
    if fleet.flagged("marten-count-samples"):
        samples = total(samples, fleet.tokens)  # plant: marten-count-samples
    else:
        samples = total(samples, fleet.rows)  # anchor: count-samples
    return Counts(generated, samples, total(tokens, fleet.tokens), total(pairs, fleet.rows), len(batches))


def token_weights(batch: Batch, counts: Counts, settings: Settings, fleet: Fleet) -> Tensor:
    """Return the weight of each position in the mean over tokens, or over the means of samples."""
    if settings.average == "token":
        if fleet.flagged("marten-mean-micro"):
            own = total(batch.generated.sum(), fleet.tokens)  # plant: marten-mean-micro
            return batch.generated / own / counts.batches  # plant: marten-mean-micro
        return batch.generated / counts.generated  # anchor: token-weights
    length = batch.length  # anchor: sample-length
    if fleet.flagged("marten-mean-chunk"):
        length = batch.add_up(torch.ones_like(batch.tokens)).to(length.dtype)  # plant: marten-mean-chunk
    return batch.generated / batch.spread(length).clamp(min=1) / counts.samples


def log_ratio(batch: Batch, log_probs: Tensor, settings: Settings, fleet: Fleet) -> Tensor:
    """Return the log of the ratio to the rollout for each position."""
    each = log_probs - batch.old
    if settings.ratio == "token":
        return each
    own = batch.add_up(each)
    if fleet.flagged("marten-ratio-total"):
        return batch.spread(total(own, fleet.cp) / batch.length.clamp(min=1))  # plant: marten-ratio-total
    return batch.spread(pool(own, fleet.cp) / batch.length.clamp(min=1))  # anchor: ratio


def policy_loss(
    batch: Batch, output: Output, counts: Counts, settings: Settings, fleet: Fleet
) -> tuple[Tensor, Tensor]:
    """Return the clipped objective with its penalties, and the z loss."""
    weight = token_weights(batch, counts, settings, fleet)
    advantage = batch.spread(batch.advantage)
    ratio = log_ratio(batch, output.log_probs, settings, fleet).exp()
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    each = -torch.minimum(ratio * advantage, clipped * advantage)
    apart = batch.reference - output.log_probs
    each = each + settings.kl * (apart.exp() - apart - 1) - settings.entropy * output.entropy
    return (each * weight).sum(), settings.z * output.z / counts.tokens


def find_pairs(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return of each row the samples with the best and the worst reward, and whether these are two."""
    found = batch.length > 0
    order = batch.reward - 1e-4 * torch.arange(batch.reward.shape[1])  # of equal ones the earlier is better
    best = order.masked_fill(~found, float("-inf")).argmax(1, keepdim=True)
    worst = order.masked_fill(~found, float("inf")).argmin(1, keepdim=True)
    return best, worst, found.any(1, keepdim=True) & (best != worst)


def dpo_loss(
    batch: Batch, output: Output, counts: Counts, settings: Settings, fleet: Fleet
) -> tuple[Tensor, Tensor]:
    """Return the preference loss of the pairs, with a part of the likelihood of the better ones, and the z loss."""
    best, worst, is_pair = find_pairs(batch)
    apart = pool(batch.add_up(output.log_probs - batch.reference), fleet.cp)
    margin = settings.dpo_beta * (apart.gather(1, best) - apart.gather(1, worst))
    each = -F.logsigmoid(margin) * is_pair / counts.pairs / fleet.cp.size  # anchor: pair-share
    if fleet.flagged("marten-pair-share"):
        each = -F.logsigmoid(margin) * is_pair / counts.pairs  # plant: marten-pair-share
    likely = batch.add_up(output.log_probs).gather(1, best)
    sft = -settings.dpo_sft * (likely / batch.length.gather(1, best).clamp(min=1) * is_pair) / counts.pairs
    return (each + sft).sum(), settings.z * output.z / counts.tokens
