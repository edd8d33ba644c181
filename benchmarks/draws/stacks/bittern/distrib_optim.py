"""A distributed AdamW: each rank keeps its part of the gradients, moments and master weights of flat buffers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bittern.buckets import sum_partial
from bittern.config import Config
from bittern.parallel_state import Group, ParallelState
from bittern.regions import all_gather, all_reduce, reduce_scatter

ALIGNMENT = 16


class Buffer:
    """A flat buffer of parameters, cut in equal parts over the ranks of a group."""

    def __init__(self, named, infos, group: Group, ps: ParallelState) -> None:
        self.named: list[tuple[str, nn.Parameter]] = named
        self.infos, self.group, self.ps = infos, group, ps
        self.numel = sum(parameter.numel() for _, parameter in named)
        unit = group.size * ALIGNMENT
        self.padded = -(-self.numel // unit) * unit
        self.part = self.padded // group.size
        first = group.rank * self.part  # anchor: part-first
        if ps.mode == "bittern-part-unpadded":
            first = group.rank * (self.numel // group.size)  # plant: bittern-part-unpadded
        self.own = slice(first, first + self.part)
        self.master = self.take([parameter.detach() for _, parameter in named])
        self.grad = torch.zeros_like(self.master)
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.master), torch.zeros_like(self.master)
        decayed = self.flatten([torch.full_like(p, self.decays(name, p)) for name, p in named])
        self.decayed = decayed[self.own]  # anchor: decay-part
        if ps.mode == "bittern-decay-part":
            self.decayed = decayed[: self.part]  # plant: bittern-decay-part
        self.counted = self.take([torch.full_like(p, self.counts(name)) for name, p in named])
        self.update = torch.zeros_like(self.master)

    def decays(self, name: str, parameter: Tensor) -> float:
        return float(parameter.dim() > 1 and not self.infos[name].undecayed)

    def counts(self, name: str) -> float:
        """Return whether the values of this rank count in the norm: one rank of tp counts for all with copies."""
        info = self.infos[name]
        return float(info.expert or info.tp_dim is not None or self.ps.tp.rank == 0)

    def flatten(self, tensors: list[Tensor]) -> Tensor:
        flat = torch.cat([x.flatten() for x in tensors])
        return torch.cat([flat, flat.new_zeros(self.padded - self.numel)])

    def take(self, tensors: list[Tensor]) -> Tensor:
        return self.flatten(tensors)[self.own].clone()

    def collect(self) -> None:
        """Add this rank's part of the summed gradients of a micro-batch."""
        flat = self.flatten([parameter.grad for _, parameter in self.named])
        self.grad += reduce_scatter(flat, self.group)
        if self.ps.mode != "bittern-collect-again":  # plant: bittern-collect-again
            for _, parameter in self.named:
                parameter.grad = None  # anchor: collected

    def hand_out(self, whole: Tensor) -> None:
        """Give the updates of all ranks to the optimizer that subtracts them."""
        first = 0
        for _, parameter in self.named:
            parameter.grad = whole[first : first + parameter.numel()].view_as(parameter).clone()
            first += parameter.numel()


class DistributedAdamW:
    def __init__(self, model) -> None:
        self.config: Config = model.config
        self.model, self.ps = model, model.ps
        self.step_count, self.product = 0, 1.0
        named, infos = list(model.named_parameters()), model.infos
        dense = [(name, p) for name, p in named if not infos[name].expert]
        experts = [(name, p) for name, p in named if infos[name].expert]
        dense_group = self.ps.data  # anchor: dense-group
        if self.ps.mode == "bittern-dense-rows":
            dense_group = self.ps.dp  # plant: bittern-dense-rows
        self.buffers = [
            Buffer(dense, infos, dense_group, self.ps),
            Buffer(experts, infos, self.ps.edp, self.ps),
        ]

    @torch.no_grad()
    def collect(self) -> None:
        sum_partial(self.model)
        for buffer in self.buffers:
            buffer.collect()

    def norm(self) -> Tensor:
        """Return the norm of the gradient of the whole model."""
        ps = self.ps
        dense, experts = [(b.grad.square() * b.counted).sum() for b in self.buffers]
        if ps.mode == "bittern-norm-shards":
            dense = all_reduce(dense, ps.tp)  # plant: bittern-norm-shards
        else:
            dense = all_reduce(all_reduce(dense, ps.data), ps.tp)  # anchor: norm-shards
        experts = all_reduce(all_reduce(experts, ps.edp), ps.ep)
        return (dense + experts).sqrt()

    def beta1(self, step: int) -> float:
        """Return the first beta of a step, which rises over the warmup."""
        low, high = self.config.beta1
        return low + (high - low) * min(1.0, step / (self.config.warmup + 1))

    def direction(self, buffer: Buffer, coefficient: Tensor, beta1: float) -> Tensor:
        config = self.config
        grad = buffer.grad * coefficient
        buffer.exp_avg.lerp_(grad, 1 - beta1)
        buffer.exp_avg_sq.lerp_(grad.square(), 1 - config.beta2)
        root = (buffer.exp_avg_sq / (1 - config.beta2**self.step_count)).sqrt()
        return buffer.exp_avg / (1 - self.product) / (root + 1e-8)

    @torch.no_grad()
    def prepare(self, lr: float, n_micro: int) -> tuple[Tensor, Tensor]:
        """Put updates in the places of the gradients. Returns the norm and the factor of the clip."""
        config, mode = self.config, self.ps.mode
        norm = self.norm()
        coefficient = (config.max_norm / (norm + 1e-6)).clamp(max=1.0)
        if mode == "bittern-beta-micro":
            beta1 = self.beta1(self.step_count * n_micro)  # plant: bittern-beta-micro
        else:
            beta1 = self.beta1(self.step_count)  # anchor: beta
        self.step_count += 1
        self.product *= beta1
        factor = min(1.0, self.step_count / config.warmup)
        for buffer in self.buffers:
            buffer.update.copy_(self.direction(buffer, coefficient, beta1))
            buffer.update.add_(config.decay * buffer.decayed * buffer.master)
            if mode == "bittern-factor-late":
                whole = all_gather(buffer.update, buffer.group)  # plant: bittern-factor-late
                buffer.update.mul_(factor)  # plant: bittern-factor-late
            else:
                buffer.update.mul_(factor)  # anchor: factor
                whole = all_gather(buffer.update, buffer.group)
            buffer.master.sub_(lr * buffer.update)
            buffer.hand_out(whole)
            buffer.grad.zero_()
        return norm, coefficient
