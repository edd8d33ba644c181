"""Check of an optimizer's updates against its options, gradients and moments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from moeverify.cases.schema import Optimizer as OptimizerSpec
from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.results.cause import Cause
from moeverify.results.checks import Kind
from moeverify.results.finding import Finding
from moeverify.results.guard import GuardCheck
from moeverify.results.place import Place, Stage
from moeverify.scripts.guard.samples import NUM_ELEMENTS
from moeverify.train.optimizer_kinds import OPTIMIZER, OptimizerKind
from moeverify.verification.checks.recomputed_step import Row, Sampled, fit, read_batch, recompute
from moeverify.verification.checks.sampling import sample

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
        for group in optimizer.param_groups:
            kind = find_kind(optimizer, group)
            members = [
                self._sample(by_id[id(parameter)], kind)
                for parameter in group["params"]
                if kind is not None and id(parameter) in by_id and parameter.grad is not None
            ]
            self._groups.append((group, members))

    def list_unjudged(self) -> list[str]:
        """Return a note if the arithmetic of the optimizer is unknown."""
        if all(find_kind(self._optimizer, group) is not None for group in self._optimizer.param_groups):
            return []
        return [f"updates of {type(self._optimizer).__name__}: they are not recomputed with these options"]

    def finish(self, step: int, rank: int) -> list[Finding]:
        """Return a finding for each tensor with a wrong element. Synchronizes with the device."""
        findings: list[Finding] = []
        for group, members in self._groups:
            if not members:
                continue
            kind = find_kind(self._optimizer, group)
            by_key: dict[_Alike, list[Sampled]] = {}
            for sampled in members:
                assert kind is not None
                if sampled.weight is None:
                    continue
                sampled.change = sample(sampled.shard.local(), sampled.stride) - sampled.weight
                self._keep_moments(sampled, kind, sampled.after)
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

    def _sample(self, shard: LocalShard, kind: OptimizerKind | None) -> Sampled:
        assert kind is not None
        gradient = shard.local(shard.tensor.grad)
        stride = -(-max(shard.region.numel, 1) // NUM_ELEMENTS)
        # The parameter's own step counter before the step: other parameters may have more steps.
        number = int(self._optimizer.state.get(shard.tensor, {}).get("step", 0)) + 1
        sampled = Sampled(shard, stride, sample(gradient, stride), number=number)
        if gradient.numel():
            sampled.weight = sample(shard.local(), stride)
            sampled.dtypes |= {gradient.dtype, shard.local().dtype}
            self._keep_moments(sampled, kind, sampled.before)
        return sampled

    def _keep_moments(self, sampled: Sampled, kind: OptimizerKind, values: dict[str, Tensor]) -> None:
        for name in kind.moments:
            moment = self._optimizer.state.get(sampled.shard.tensor, {}).get(name)
            if isinstance(moment, Tensor):
                local = sampled.shard.local(moment)
                values[name] = sample(local, sampled.stride)
                sampled.dtypes.add(local.dtype)


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


def _is_wrong(row: Row) -> bool:
    # NaN from a gradient is not an error of the optimizer.
    return not row.worst <= 1.0 and (math.isfinite(row.expected) or math.isfinite(row.actual))


def _make_finding(row: Row, rank: int) -> Finding:
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
