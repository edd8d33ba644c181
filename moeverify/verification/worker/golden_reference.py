"""Reference of `diff --golden`: compares the values of a rank stopped in the debugger with the golden.

The golden holds each tensor at one moment of a step: a gradient when it is complete and not yet clipped, a
weight before step 0 and after each step. Tensors are compared when the training loop shows them, because
the loop may change them afterwards. A value at the prompt is matched to a shown tensor by its memory
address.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.parallel.regions.observer import INITIAL
from moeverify.parallel.regions.placement import local_part
from moeverify.parallel.regions.region import Region
from moeverify.results.checks import UNCOMPARED_KINDS, ZERO_KINDS, Kind
from moeverify.train.program import TrainingProgram
from moeverify.verification.checks.base import Watch
from moeverify.verification.checks.bounds import FLOOR, Bounds, Norms
from moeverify.verification.checks.golden_tensors import GoldenTensors, find_unit
from moeverify.verification.checks.registry import KIND_ORDER, check_of
from moeverify.verification.compare.difference import TensorDifference, measure
from moeverify.verification.golden.store import StoredGolden, tensor_key
from moeverify.verification.worker.blamed_place import ModuleValue
from multiprocessing_pdb.rank.reference import ReferenceRow

_WHAT = (
    "it has a parameter, its .grad, a module, a tensor that this step has shown (such as `actual`), or the name of"
    " one in quotes"
)


_NOTE = (
    "values shown in this step before the first question cannot be compared: ask again in the next step; weights, and"
    " gradients that are not complete, are compared at any time"
)


@dataclass(frozen=True)
class _Known:
    """A shard that the golden also has.

    `statistics` were measured when the shard was shown; None means that they are measured when asked for.
    """

    step: int
    kind: str
    name: str
    region: Region
    local: Tensor | None
    statistics: Tensor | None = None
    note: str = ""
    scale: tuple[float, float] | None = None  # (norm, bound) of a value that the golden does not store

    @property
    def title(self) -> str:
        when = "before step 0" if self.step == INITIAL else f"at step {self.step}"
        return f"{self.kind.replace('_', ' ')} {self.name} {when}{self.note}"


class GoldenReference(Watch[None]):
    """Reference that compares a stopped rank's values in its step; see `multiprocessing_pdb.rank.reference`.

    With `waits=True` it compares nothing until the first question, to cost nothing. From the next step on
    it compares every tensor that is shown. Until then it can compare only weights and incomplete gradients.
    """

    def __init__(
        self, program: TrainingProgram, golden: StoredGolden, bounds: Bounds, *, waits: bool = False
    ) -> None:
        self._program = program
        self._golden = golden
        self._bounds = bounds
        self._step = 0
        self.note = ""  # which values the last answer leaves out
        self._compares = not waits
        self._is_asked = not waits
        self._missed: set[str] = set()  # kinds that were shown in this step but not compared
        self._known: list[_Known] = []
        self._last_update: _Known | None = None
        self._read_norms = cache(self._compute_norms)

    def begin_step(self, step: int) -> None:
        """Discard the tensors of the previous step."""
        self._step = step
        self._compares = self._is_asked
        self._missed.clear()
        self._known.clear()
        self._last_update = None

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Compare one shard with the golden; see `moeverify.parallel.regions.observer.Observer`."""
        if not self._compares:
            self._missed.add(kind)
            return
        if kind not in KIND_ORDER or kind in UNCOMPARED_KINDS | ZERO_KINDS:
            return
        expected = self._golden.read(step, kind, name, region)
        if expected is None:
            return
        actual = torch.zeros(region.local_shape) if local is None else local.detach()
        statistics = measure(expected, actual.reshape(region.local_shape))
        known = _Known(step, kind, name, region, local, statistics)
        if kind == Kind.UPDATE:
            # Updates exist only for this comparison. All of them together need as much memory as the model.
            self._last_update, known = known, replace(known, local=None)
        self._known.append(known)

    def show(self, value: ModuleValue) -> None:
        """Compare a module's value with the single-device value, which the golden does not store."""
        expected = value.region.take(value.expected)
        statistics = measure(expected, value.actual.detach().reshape(value.region.local_shape))
        scale = (float(value.expected.norm()), value.bound)
        self._known.append(
            _Known(self._step, value.kind, value.module, value.region, value.actual, statistics, scale=scale)
        )

    def compare(self, value: Any, check: Callable[[], None]) -> Sequence[ReferenceRow]:
        """Return how a value, or every known tensor for None, differs from the golden; see `Reference`.

        Raises: LookupError if the golden has no tensor for this value in this step.
        """
        self._is_asked = True
        self.note = _NOTE if self._missed and value is None else ""
        if value is None:
            return list(self._compare_each([*self._known, *self._list_weights(self._program.shards)], check))
        known = self._find(value)
        if not known:
            hint = _NOTE if self._missed else _WHAT
            raise LookupError(
                f"{_describe(value)} is nothing that the golden has at step {self._step}; {hint}"
            )
        return list(self._compare_each(known, check))

    def _compare_each(self, known: Iterable[_Known], check: Callable[[], None]) -> Iterator[ReferenceRow]:
        for each in known:
            check()
            row = self._make_row(each)
            if row is not None:
                yield row

    def _make_row(self, known: _Known) -> ReferenceRow | None:
        statistics = known.statistics
        if statistics is None:
            expected = self._golden.read(known.step, known.kind, known.name, known.region)
            if expected is None:
                return None
            local = torch.zeros(known.region.local_shape) if known.local is None else known.local.detach()
            statistics = measure(expected, local.reshape(known.region.local_shape))
        difference = TensorDifference.from_statistics(statistics.tolist())
        norm, bound = self._find_bound(known)
        differs = difference.max_error > 0 or difference.num_nonfinite > 0
        return ReferenceRow(
            name=known.title,
            region=known.region.key,
            squared_error=math.inf if difference.num_nonfinite else difference.sum_error2,
            norm=norm,
            bound=bound,
            index=known.region.global_index(int(difference.position)) if differs else (),
            expected=difference.expected_at,
            actual=difference.actual_at,
        )

    def _list_weights(self, shards: Iterable[LocalShard]) -> Iterator[_Known]:
        """Yield the current parameters, paired with the golden's weights after the last completed update."""
        is_updated = Kind.UPDATE in self._missed or any(
            known.kind == Kind.UPDATE and known.step == self._step for known in self._known
        )
        step = self._step if is_updated else self._step - 1
        kind = Kind.INITIAL_WEIGHT if step == INITIAL else Kind.WEIGHT
        for shard in shards:
            yield _Known(step, kind, shard.name, shard.region, shard.local())

    def _find(self, value: Any) -> list[_Known]:
        """Return the known shards for a value at the prompt: a name, module or tensor."""
        if isinstance(value, str):
            named = [shard for shard in self._program.shards if shard.name == value]
            return [
                *(known for known in self._known if value in (known.name, f"{known.kind} {known.name}")),
                *self._list_weights(named),
            ]
        if isinstance(value, nn.Module):
            inside = {id(parameter) for parameter in value.parameters()}
            shards = [shard for shard in self._program.shards if id(shard.tensor) in inside]
            names = {shard.name for shard in shards}
            gradients = [
                known for known in self._known if known.kind == Kind.GRADIENT and known.name in names
            ]
            return [*gradients, *self._list_weights(shards)]
        if not isinstance(value, Tensor):
            return []
        own = [shard for shard in self._program.shards if shard.tensor is value]
        if own:
            return list(self._list_weights(own))
        owners = [shard for shard in self._program.shards if shard.tensor.grad is value]
        return self._list_gradients(owners, value) if owners else self._find_by_memory(value)

    def _list_gradients(self, shards: Iterable[LocalShard], gradient: Tensor) -> list[_Known]:
        """Return the shown gradient for a `.grad`, or the `.grad` itself marked as not complete yet."""
        found: list[_Known] = []
        if Kind.GRADIENT in self._missed:  # clipping may have changed them since
            return found
        for shard in shards:
            shown = [
                known for known in self._known if known.kind == Kind.GRADIENT and known.name == shard.name
            ]
            note = ", not complete yet"
            now = _Known(
                self._step, Kind.GRADIENT, shard.name, shard.region, shard.local(gradient), note=note
            )
            found += shown or [now]
        return found

    def _find_by_memory(self, value: Tensor) -> list[_Known]:
        """Return the tensors shown in this step that share memory with `value`, as they were when shown."""
        local = local_part(value.detach())
        shown = self._known if self._last_update is None else [*self._known, self._last_update]
        return [
            known
            for known in shown
            if known.local is not None
            and local.numel() > 0
            and known.local.numel() == local.numel()
            and known.local.device == local.device
            and local_part(known.local).data_ptr() == local.data_ptr()
        ]

    def _find_bound(self, known: _Known) -> tuple[float, float]:
        """Return (norm of the whole golden tensor, allowed error relative to this norm)."""
        if known.scale is not None:
            return known.scale
        step, kind, name = known.step, known.kind, known.name
        norms = self._read_norms(step, kind, find_unit((step, kind, name)))
        norm, kind_norm = norms.get(name, 0.0), math.hypot(*norms.values())
        if kind == Kind.WEIGHT:
            return norm, self._bound_weight(step, name, norm)
        check = check_of(kind)
        criterion = check.criterion if isinstance(check, GoldenTensors) else None
        assert criterion is not None  # `observe` keeps only kinds of such checks
        if norm == 0.0 and not criterion.exact:
            return kind_norm, self._bounds.zero_bound()
        return norm, self._bounds.bound((step, kind, name), criterion, Norms(norm, kind_norm))

    def _bound_weight(self, step: int, name: str, norm: float) -> float:
        """Return the sum of the bounds of all updates so far: no check compares weights alone."""
        allowed = 0.0
        for earlier in range(step + 1):
            known = _Known(earlier, Kind.UPDATE, name, Region.whole(()), None)
            scale, bound = self._find_bound(known)
            allowed += scale * bound
        floor = FLOOR[self._bounds.precision]
        return allowed / norm + floor if norm > 0.0 else floor

    def _compute_norms(self, step: int, kind: str, unit: tuple[int, str, str]) -> Mapping[str, float]:
        """Return the norm of each golden tensor of a unit (see `find_unit`), by name."""
        prefix = tensor_key(kind, "")
        names = [key.removeprefix(prefix) for key in self._golden.keys(step) if key.startswith(prefix)]
        return {
            name: self._golden.norm(step, prefix + name)
            for name in names
            if find_unit((step, kind, name)) == unit
        }


def _describe(value: Any) -> str:
    if isinstance(value, str):
        return repr(value)
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    return f"this {type(value).__name__}{shape}"
