"""One optimizer step, with torch's AdamW or with the distributed one."""

from __future__ import annotations

import torch
from torch import Tensor

from bittern.buckets import Reducer
from bittern.clip import clip_gradients
from bittern.context import shift_left
from bittern.distrib_optim import DistributedAdamW
from bittern.model import Bittern
from bittern.regions import all_reduce


class Step:
    """Forward and backward passes of the micro-batches of one step."""

    def __init__(self, model: Bittern, optimizer, micro_batches) -> None:
        self.model, self.ps = model, model.ps
        self.optimizer, self.micro_batches = optimizer, micro_batches
        model.rotary.begin_step()
        for router in model.routers:
            router.load.zero_()
        self.count()

    def count(self) -> None:
        """Count the targets of the global batch, for each head."""
        ps = self.ps
        own = sum((targets >= 0).sum() for _, targets in self.micro_batches)
        axis = ps.data  # anchor: count-tokens
        if ps.mode == "bittern-count-world":
            axis = ps.world  # plant: bittern-count-world
        self.num_valid = all_reduce(own, axis)
        following = sum((shift_left(t, -100, ps.cp) >= 0).sum() for _, t in self.micro_batches)
        axis = ps.data  # anchor: count-following
        if ps.mode == "bittern-count-following":
            axis = ps.dp  # plant: bittern-count-following
        self.num_following = all_reduce(following, axis)
        ps.num_valid, ps.loss_scale = self.num_valid, 1.0 / self.num_valid  # anchor: loss-scale
        if ps.mode == "bittern-aux-own-count":
            ps.loss_scale = 1.0 / own  # plant: bittern-aux-own-count

    def combine(self, terms: dict[str, Tensor], targets: Tensor) -> Tensor:
        """Return this rank's part of the loss of the global batch."""
        ps, weight = self.ps, self.model.config.mtp_weight
        num_valid = self.num_valid  # anchor: divisor
        if ps.mode == "bittern-count-micro":
            num_valid = all_reduce((targets >= 0).sum(), ps.data) * len(
                self.micro_batches
            )  # plant: bittern-count-micro
        return terms["lm"] / num_valid + weight * terms["mtp"] / self.num_following

    def run(self, each=None, last=None) -> Tensor:
        """Call `each` after every micro-batch and `last` after the last one. Returns the whole loss."""
        model, ps, n_micro = self.model, self.ps, len(self.micro_batches)
        total = torch.zeros((), dtype=torch.float64)
        packed = model.prepare(*self.micro_batches[0])
        for index, (tokens, targets) in enumerate(self.micro_batches):
            if ps.mode == "bittern-zero-inside":
                self.optimizer.zero_grad()  # plant: bittern-zero-inside
            loss = self.combine(model(tokens, targets, packed), targets)
            if index + 1 < n_micro:
                packed = model.prepare(*self.micro_batches[index + 1])
            loss.backward()
            total = total + loss.detach()
            if ps.mode == "bittern-bias-micro":
                update_biases(model)  # plant: bittern-bias-micro
            if each:
                each()
            final = index == n_micro - 1  # anchor: last-micro
            if ps.mode == "bittern-reduce-first":
                final = index == 0  # plant: bittern-reduce-first
            if last and final:
                last()
        axis = ps.data  # anchor: report-axis
        if ps.mode == "bittern-report-rows":
            axis = ps.dp  # plant: bittern-report-rows
        return all_reduce(total, axis)


def update_biases(model: Bittern) -> None:
    for router in model.routers:
        router.update_bias()


def end_step(model: Bittern) -> None:
    if model.ps.mode != "bittern-bias-micro":  # plant: bittern-bias-micro
        update_biases(model)  # anchor: bias-step
    if model.config.ema:
        model.averages.update(model)


def train_step(model, optimizer, micro_batches, *, scheduler, clip_norm):
    """Step with torch's optimizer on complete gradients."""
    if model.run is None:
        model.run = Reducer(model)
    step = Step(model, optimizer, micro_batches)
    if model.ps.mode == "bittern-clip-early":
        loss = step.run()
        norm, coefficient = clip_gradients(model, clip_norm)  # plant: bittern-clip-early
        model.run()  # plant: bittern-clip-early
    else:
        loss = step.run(last=model.run)  # anchor: reduce-then-clip
        norm, coefficient = clip_gradients(model, clip_norm)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    end_step(model)
    return {"loss": loss, "gradient_norm": norm, "clip_coefficient": coefficient}


def distributed_step(model, optimizer, micro_batches):
    """Step with the distributed AdamW, whose updates plain SGD subtracts."""
    if model.run is None:
        model.run = DistributedAdamW(model)
    step = Step(model, optimizer, micro_batches)
    loss = step.run(each=model.run.collect)
    norm, coefficient = model.run.prepare(optimizer.param_groups[0]["lr"], len(micro_batches))
    optimizer.step()
    optimizer.zero_grad()
    end_step(model)
    return {"loss": loss, "gradient_norm": norm, "clip_coefficient": coefficient}
