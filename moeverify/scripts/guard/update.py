"""Check of an optimizer's updates against its options, gradients and moments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from moeverify.cases.schema import Optimizer as OptimizerSpec
from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.parallel.regions.placement import is_placed_alike
from moeverify.results.cause import Cause
from moeverify.results.checks import Kind
from moeverify.results.finding import Finding
from moeverify.results.guard import GuardCheck
from moeverify.results.place import Place, Stage
from moeverify.scripts.guard.samples import NUM_ELEMENTS
from moeverify.train.optimizer_kinds import OPTIMIZER, OptimizerKind
from moeverify.verification.checks.recomputed_step import (
    RecomputedTensor,
    Sampled,
    fit,
    read_batch,
    recompute,
)
from moeverify.verification.checks.sampling import sample_all

_KINDS = {"SGD": "sgd", "Adam": "adam", "AdamW": "adamw"}
# Options that change the arithmetic and are not supported by the recomputation.
_UNKNOWN = ("amsgrad", "maximize", "nesterov", "dampening", "differentiable")


# Key of shards that are recomputed together: step number, moments before and after, dtypes, device.
_Alike = tuple[int, frozenset[str], frozenset[str], frozenset[torch.dtype], torch.device]


class UpdateWatch:
    """Samples of the inputs of an optimizer step, which is recomputed after the step.

    Only optimizers named SGD, Adam or AdamW with torch's options are checked. The arithmetic of others is
    unknown.
    """

    def __init__(self, optimizer: Optimizer, shards: Sequence[LocalShard]) -> None:
        self._optimizer = optimizer
        by_id = {id(shard.tensor): shard for shard in shards}
        self._groups: list[tuple[dict[str, Any], list[Sampled]]] = []
        self._num_apart = 0  # parameters whose gradients have other placements
        wanted = _Wanted()
        for group in optimizer.param_groups:
            kind = find_kind(optimizer, group)
            members = [
                self._begin(by_id[id(parameter)], kind, wanted)
                for parameter in group["params"]
                if kind is not None and id(parameter) in by_id and self._is_comparable(parameter)
            ]
            self._groups.append((group, members))
        wanted.take()

    def _is_comparable(self, parameter: Tensor) -> bool:
        if parameter.grad is None or is_placed_alike(parameter, parameter.grad):
            return parameter.grad is not None
        self._num_apart += 1
        return False

    def list_unjudged(self) -> list[str]:
        """Return a note if updates are not recomputed: the arithmetic or the gradient's placement is another."""
        if self._num_apart:
            return [f"updates of {self._num_apart} parameters: their gradients have other placements"]
        if all(find_kind(self._optimizer, group) is not None for group in self._optimizer.param_groups):
            return []
        return [f"updates of {type(self._optimizer).__name__}: they are not recomputed with these options"]

    def finish(self, step: int, rank: int) -> list[Finding]:
        """Return a finding for each tensor with a wrong element. Synchronizes with the device."""
        findings: list[Finding] = []
        self._sample_after()
        for group, members in self._groups:
            kind = find_kind(self._optimizer, group)
            by_key: dict[_Alike, list[Sampled]] = {}
            for sampled in members:
                if sampled.weight is None:
                    continue
                if isinstance(group["lr"], Tensor):
                    sampled.dtypes.add(group["lr"].dtype)  # products with it are rounded to its dtype
                moments = frozenset(sampled.before), frozenset(sampled.after)
                alike = (sampled.number, *moments, frozenset(sampled.dtypes), sampled.gradient.device)
                by_key.setdefault(alike, []).append(sampled)
            for together in by_key.values():
                assert kind is not None
                batches = recompute(
                    kind,
                    _make_spec(group),
                    [(together, float(group.get("weight_decay", 0.0)))],
                    step=step,
                    lr=float(group["lr"]),
                )
                rows = [row for batch in batches for row in read_batch(batch)]
                findings += [_make_finding(row, rank) for row in rows if _is_wrong(row)]
        return findings

    def _begin(self, shard: LocalShard, kind: OptimizerKind | None, wanted: _Wanted) -> Sampled:
        """Return a shard, and add its gradient, weight and moments to `wanted`."""
        assert kind is not None
        gradient = shard.local(shard.tensor.grad)
        stride = -(-max(shard.region.numel, 1) // NUM_ELEMENTS)
        # The parameter's own step counter before the step: other parameters may have more steps.
        number = int(self._optimizer.state.get(shard.tensor, {}).get("step", 0)) + 1
        sampled = Sampled(shard, stride, gradient, number=number)
        wanted.add(gradient, stride, partial(setattr, sampled, "gradient"))
        if gradient.numel():
            wanted.add(shard.local(), stride, partial(setattr, sampled, "weight"))
            sampled.dtypes |= {gradient.dtype, shard.local().dtype}
            self._want_moments(sampled, kind, sampled.before, wanted)
        return sampled

    def _sample_after(self) -> None:
        """Sample the changes of the weights, and the moments after the step."""
        wanted = _Wanted()
        for group, members in self._groups:
            kind = find_kind(self._optimizer, group)
            for sampled in members:
                if kind is not None and sampled.weight is not None:
                    wanted.add(sampled.shard.local(), sampled.stride, partial(_set_change, sampled))
                    self._want_moments(sampled, kind, sampled.after, wanted)
        wanted.take()

    def _want_moments(
        self, sampled: Sampled, kind: OptimizerKind, values: dict[str, Tensor], wanted: _Wanted
    ) -> None:
        for name in kind.moments:
            moment = self._optimizer.state.get(sampled.shard.tensor, {}).get(name)
            if isinstance(moment, Tensor):
                local = sampled.shard.local(moment)
                wanted.add(local, sampled.stride, partial(values.__setitem__, name))
                sampled.dtypes.add(local.dtype)


class _Wanted:
    """Local tensors to sample, and where their samples go; those of one device are taken together."""

    def __init__(self) -> None:
        self._by_device: dict[torch.device, list[tuple[Tensor, int, Callable[[Tensor], None]]]] = {}

    def add(self, local: Tensor, stride: int, put: Callable[[Tensor], None]) -> None:
        self._by_device.setdefault(local.device, []).append((local, stride, put))

    def take(self) -> None:
        for chosen in self._by_device.values():
            samples = sample_all([(local, stride) for local, stride, _ in chosen])
            for (_, _, put), values in zip(chosen, samples, strict=True):
                put(values)


def _set_change(sampled: Sampled, after: Tensor) -> None:
    assert sampled.weight is not None
    sampled.change = after - sampled.weight


def find_kind(optimizer: Optimizer, group: dict[str, Any]) -> OptimizerKind | None:
    """Return the kind that recomputes steps of an optimizer's group, or None if it is not supported."""
    name = _KINDS.get(type(optimizer).__name__)
    if name is None or any(group.get(option) for option in _UNKNOWN):
        return None
    needed = ("lr", "momentum") if name == "sgd" else ("lr", "betas", "eps")
    if any(option not in group for option in needed) or getattr(optimizer, "grad_scale", None) is not None:
        return None  # a scaler that unscales within the step
    return OPTIMIZER.find("adamw" if name == "adam" and group.get("decoupled_weight_decay") else name)


def _make_spec(group: dict[str, Any]) -> OptimizerSpec:
    # Without validation: options that a case does not allow are recomputed too.
    return OptimizerSpec.model_construct(
        betas=tuple(map(float, group.get("betas", (0.9, 0.999)))),
        eps=float(group.get("eps", 1e-8)),
        momentum=float(group.get("momentum", 0.0)),
    )


def _is_wrong(row: RecomputedTensor) -> bool:
    # NaN from a gradient is not an error of the optimizer.
    return not row.worst <= 1.0 and (math.isfinite(row.expected) or math.isfinite(row.actual))


def _make_finding(row: RecomputedTensor, rank: int) -> Finding:
    step, kind, name = row.key
    scale = math.sqrt(row.sum_expected2 / row.num_elements) if row.sum_expected2 > 0.0 else 1.0
    error = abs(row.actual - row.expected) / scale
    stage = Stage.OPTIMIZER_STEP
    return Finding(
        check=GuardCheck.UPDATE,
        kind=kind if kind == Kind.UPDATE else Kind.OPTIMIZER_STATE,
        tensor=name,
        step=step,
        rank=rank,
        ranks=(rank,),
        error=error if math.isfinite(error) else math.inf,
        bound=row.allowed / scale,
        index=row.index,
        expected=row.expected,
        actual=row.actual,
        code=Cause.OPTIMIZER,
        facts=fit(row),
        place=Place(ranks=(rank,), stage=stage),
    )
