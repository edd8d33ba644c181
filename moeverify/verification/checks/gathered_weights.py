"""Check that modules compute with the weights that the ranks store, after FSDP gathers them.

The comparison with the golden sees a stale weight only by its effect, which rounding to a narrow dtype may
hide. This check uses neither golden nor noise. When the forward pass of a module begins, the rank compares
the gathered weight with its own shard. The elements it stores must be equal bit for bit, in the dtype of
use.

Each rank compares only its own shard. Together the ranks cover the gathered tensor, which is the same on
all of them. DDP, tensor and expert parallelism alone use the stored weights directly, so there is nothing to
check. Compiled modules and tensor subclasses with their own arithmetic, such as float8, are not checked
either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from moeverify.parallel.regions.local_shard import flat_shards, logical_name
from moeverify.parallel.regions.placement import local_part, region_of
from moeverify.parallel.regions.region import Region
from moeverify.parallel.regions.unseen import unseen
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName
from moeverify.results.facts import GatheredFacts
from moeverify.results.finding import Finding
from moeverify.results.place import Place
from moeverify.train.program import TrainingProgram
from moeverify.verification.checks.base import (
    Check,
    CheckOutcome,
    RankRun,
    Role,
    ShownTensors,
    Watch,
    make_outcome,
)
from moeverify.verification.checks.dtype_watch import list_slots
from moeverify.verification.checks.narrower import name_dtype
from moeverify.verification.checks.precision import WHOLE, join_by_module
from moeverify.verification.compare.difference import fingerprint_bits

MOST_ELEMENTS = 1 << 10
"""Maximum number of evenly spaced elements compared per shard. Stale or misplaced weights differ in many."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class StaleParameter:
    """First use of a parameter with values other than the stored ones.

    `num_wrong` of `num_compared` elements differ, the first at `index`. `is_stale` means that all used
    values are from the previous step. `used` and `stored` are hashes of the compared elements, as used and
    as stored on this rank.
    """

    step: int
    parameter: str
    dtype: str
    num_wrong: int
    num_compared: int
    index: tuple[int, ...]
    expected: float
    actual: float
    is_stale: bool
    used: int | None = None
    stored: int | None = None


@dataclass(frozen=True)
class GatheredReport:
    """Parameters that a rank saw gathered, and their differences.

    `unmoved` are parameters that the step before a difference did not change in the dtype of use. For these
    a stale weight cannot be told from a new one.
    """

    names: tuple[str, ...]
    differences: tuple[StaleParameter, ...]
    unmoved: frozenset[str] = frozenset()


@dataclass
class _Place:
    """Location of the compared elements in a tensor: one coordinate tensor (elements) per dim.

    `run` are their row-major positions, if these are evenly spaced. Then a view can select them.
    """

    coordinates: tuple[Tensor, ...]
    run: range | None

    @classmethod
    def of(cls, coordinates: tuple[Tensor, ...], shape: Sequence[int]) -> _Place:
        """Return the place of CPU coordinates in a tensor of the given shape."""
        flat = torch.zeros_like(coordinates[0])
        for size, along in zip(shape, coordinates, strict=True):
            flat = flat * size + along
        steps = flat.diff()
        step = int(steps[0]) if len(steps) else 1
        is_even = step > 0 and bool((steps == step).all())
        run = range(int(flat[0]), int(flat[-1]) + 1, step) if is_even else None
        return cls(coordinates, run)

    def pick(self, tensor: Tensor) -> Tensor:
        """Return the elements: a view if possible, else a copy. Shape: (elements)."""
        if self.run is not None and tensor.is_contiguous():
            first = tensor.storage_offset() + self.run.start
            return tensor.as_strided((len(self.run),), (self.run.step,), first)
        # Keep the coordinates on the device. A transfer in each step would make the host wait for the
        # device.
        self.coordinates = tuple(each.to(tensor.device) for each in self.coordinates)
        return tensor[self.coordinates]


@dataclass
class _Weight:
    """A sharded parameter, with access to its stored values and the elements to compare.

    `stored_at` locates the elements in the stored tensor. `logical_at` are their coordinates in the logical
    tensor, one tensor (elements) per dim. `now` and `before` are their values at the start of this step and
    of the previous one.
    """

    name: str
    region: Region
    read: Callable[[], Tensor]
    stored_at: _Place
    logical_at: tuple[Tensor, ...]
    now: Tensor | None = None
    before: Tensor | None = None

    def pick(self) -> Tensor:
        """Return the compared elements as stored now: a view or a copy. Shape: (elements)."""
        return self.stored_at.pick(self.read().detach())


@dataclass(frozen=True)
class _UsedValues:
    """Values used in one step: (used, stored) elements and the stored ones (before, now) of each parameter.

    `is_wrong` (), on the CPU, tells whether anything differs. It is valid once the event `copied` has
    completed; None means it is valid already.
    """

    step: int
    values: Mapping[str, tuple[Tensor, Tensor]]
    stored: Mapping[str, tuple[Tensor | None, Tensor | None]]
    is_wrong: Tensor
    copied: torch.Event | None

    @property
    def is_known(self) -> bool:
        """Return whether the result has arrived."""
        return self.copied is None or self.copied.query()


class GatheredWatch(Watch[GatheredReport]):
    """Compares gathered parameters with the stored shards whenever the forward pass of a module begins.

    The values of a step are compared when the step is over. The result is read later, so that nothing waits
    for the device.
    """

    def __init__(self, model: nn.Module) -> None:
        self._weights = dict(_list_weights(model))
        self._slots = {
            module: found
            for prefix, module in model.named_modules()
            if (found := [slot for slot in list_slots(prefix, module) if id(slot.stored) in self._weights])
        }
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(unseen(self._look)) for module in self._slots
        ]
        self._places: dict[object, _Place | None] = {}
        self._used_values: dict[str, tuple[Tensor, Tensor]] = {}
        self._unread: deque[_UsedValues] = deque()
        self._seen: set[str] = set()
        self._differences: dict[str, StaleParameter] = {}
        self._unmoved: set[str] = set()
        self._step = -1

    def begin_step(self, step: int) -> None:
        """Compare the values of the previous step, and keep the values stored now; see `Watch`."""
        self._compare()
        while self._unread and self._unread[0].is_known:
            self._judge(self._unread.popleft())
        self._step = step
        stored = [weight.pick() for weight in self._weights.values()]
        copies = _copy_together([(each, each) for each in stored])
        for weight, copy in zip(self._weights.values(), copies, strict=True):
            weight.before, weight.now = weight.now, copy

    def close(self) -> None:
        """Judge the last steps and release the model; see `Watch`."""
        self._compare()
        while self._unread:
            self._judge(self._unread.popleft())
        for handle in self._handles:
            handle.remove()
        self._handles, self._slots, self._weights = [], {}, {}

    def report(self) -> GatheredReport:
        """Return the parameters seen and their differences; see `Watch`."""
        found = tuple(self._differences.values())
        return GatheredReport(tuple(sorted(self._seen)), found, frozenset(self._unmoved))

    @torch.no_grad()
    def _look(self, module: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return  # the compiled code must be the same as without a watch
        names, used_now, stored_now = list[str](), list[Tensor](), list[Tensor]()
        for slot in self._slots.get(module, ()):
            # Not `getattr`: a parametrization would gather again, with one more collective.
            used = slot.owner._parameters.get(slot.attribute, slot.owner.__dict__.get(slot.attribute))
            weight = self._weights[id(slot.stored)]
            if used is None or used is slot.stored or weight.name in self._differences:
                continue
            local = local_part(used)
            place = self._find_place(weight, used) if type(local) in (Tensor, nn.Parameter) else None
            if place is not None:
                names.append(weight.name)
                used_now.append(place.pick(local.detach()))
                stored_now.append(weight.pick())
        # Stored values are cast to the dtype of use.
        wanted = [*((each, each) for each in used_now), *zip(stored_now, used_now, strict=True)]
        copies = _copy_together(wanted)
        for name, actual, expected in zip(names, copies, copies[len(names) :], strict=False):
            self._keep(name, actual, expected)

    def _find_place(self, weight: _Weight, used: Tensor) -> _Place | None:
        """Return the place of the compared elements in the used tensor; None if it does not contain them."""
        layout = (used.device_mesh, used.placements) if isinstance(used, DTensor) else None
        key = (weight.name, used.shape, layout)
        if key not in self._places:
            region = region_of(used)
            found = _locate(weight.logical_at, region) if region.shape == weight.region.shape else None
            self._places[key] = None if found is None else _Place.of(found, region.local_shape)
        return self._places[key]

    def _keep(self, name: str, actual: Tensor, expected: Tensor) -> None:
        """Keep the values to compare. Of several passes in a step, keep the first that differs."""
        self._seen.add(name)
        if name in self._used_values and self._used_values[name][0].dtype == actual.dtype:
            before = self._used_values[name]
            is_wrong = (_bits(before[0]) != _bits(before[1])).any()
            # On the device, since a branch would wait for it.
            actual, expected = (
                torch.where(is_wrong, old, new) for old, new in zip(before, (actual, expected), strict=True)
            )
        self._used_values[name] = (actual, expected)

    def _compare(self) -> None:
        """Compare the values of this step on the device, and start the copy of the result to the CPU."""
        used, self._used_values = self._used_values, {}
        if not used:
            return
        is_wrong = _find_any_wrong(list(used.values()))
        on_gpu = is_wrong.device.type == "cuda"
        is_wrong, copied = is_wrong.to("cpu", non_blocking=True), None
        if on_gpu:
            copied = torch.Event(device="cuda")
            copied.record()
        stored = {each.name: (each.before, each.now) for each in self._weights.values()}
        self._unread.append(_UsedValues(self._step, used, stored, is_wrong, copied))

    def _judge(self, used: _UsedValues) -> None:
        if used.copied is not None:
            used.copied.synchronize()
        if not bool(used.is_wrong):
            return
        weights = {weight.name: weight for weight in self._weights.values()}
        num_known = len(self._differences)
        for name, (actual, expected) in used.values.items():
            wrong = _bits(actual) != _bits(expected)
            if name not in self._differences and bool(wrong.any()):
                before, _ = used.stored[name]
                self._differences[name] = _describe(
                    weights[name], used.step, before, (actual, expected), wrong
                )
        if len(self._differences) > num_known:
            self._unmoved |= {
                name
                for name, (_, expected) in used.values.items()
                if _is_unmoved(*used.stored[name], expected.dtype)
            }


def _copy_together(views: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Return copies (elements) of the first vectors, with dtype and device of the second, in few launches."""
    if len({(each.dtype, each.device) for pair in views for each in pair}) == 1:  # nearly always
        some = [view for view, _ in views]
        return list(torch.split_with_sizes(torch.cat(some), [len(each) for each in some]))
    groups: dict[object, list[int]] = {}
    for place, (view, like) in enumerate(views):
        groups.setdefault((view.dtype, view.device, like.dtype, like.device), []).append(place)
    copies: dict[int, Tensor] = {}
    for places in groups.values():
        some, like = [views[place][0] for place in places], views[places[0]][1]
        together = torch.cat(some).to(like.device, like.dtype)
        copies |= dict(
            zip(places, torch.split_with_sizes(together, [len(each) for each in some]), strict=True)
        )
    return [copies[place] for place in range(len(views))]


def _find_any_wrong(values: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return whether the bits of any pair differ, (), in few launches per dtype and device."""
    groups: dict[tuple[torch.dtype, torch.device], list[tuple[Tensor, Tensor]]] = {}
    for pair in values:
        groups.setdefault((pair[0].dtype, pair[0].device), []).append(pair)
    found = []
    for pairs in groups.values():
        used, stored = (_bits(torch.cat(side)) for side in zip(*pairs, strict=True))
        found.append((used != stored).any())
    return torch.stack([each.to(found[0].device) for each in found]).any()


def _describe(
    weight: _Weight, step: int, before: Tensor | None, values: tuple[Tensor, Tensor], wrong: Tensor
) -> StaleParameter:
    """Return the difference between the values (used, stored) of a weight."""
    actual, expected = values
    stale = None if before is None else before.to(actual.device, actual.dtype)
    first = int(wrong.nonzero()[0])
    return StaleParameter(
        step=step,
        parameter=weight.name,
        dtype=name_dtype(actual.dtype),
        num_wrong=int(wrong.sum()),
        num_compared=wrong.numel(),
        index=tuple(int(each[first]) for each in weight.logical_at),
        expected=float(expected[first]),
        actual=float(actual[first]),
        is_stale=stale is not None and bool((_bits(actual) == _bits(stale)).all()),
        used=int(fingerprint_bits(actual)),
        stored=int(fingerprint_bits(expected)),
    )


def _is_unmoved(before: Tensor | None, now: Tensor | None, dtype: torch.dtype) -> bool:
    """Return whether a step left a weight unchanged in the given dtype."""
    if now is None or before is None:
        return False
    return torch.equal(_bits(now.to(dtype)), _bits(before.to(dtype)))


def _bits(values: Tensor) -> Tensor:
    """Return the bits of floating-point numbers as integers: -0.0 differs from 0.0, and NaN equals itself."""
    return values.contiguous().view(_BITS[values.element_size()])


def _list_weights(model: nn.Module) -> Iterator[tuple[int, _Weight]]:
    """Yield (id, weight) of each parameter that FSDP1 or FSDP2 shards, if this rank stores a part of it."""
    flat = {id(each.parameter): each for each in flat_shards(model)}
    is_gathered = any(isinstance(module, FSDPModule) for module in model.modules())
    for name, parameter in model.named_parameters():
        if id(parameter) in flat:
            region, read = flat[id(parameter)].region, flat[id(parameter)].read
        elif is_gathered and isinstance(parameter, DTensor):
            region, read = region_of(parameter), partial(local_part, parameter)
        else:
            continue
        if not parameter.is_floating_point() or not region.shape or not region.numel:
            continue
        # An odd stride does not stay in one column of a matrix.
        positions = torch.arange(0, region.numel, -(-region.numel // MOST_ELEMENTS) | 1)
        stored_at = _Place.of(torch.unravel_index(positions, region.local_shape), region.local_shape)
        yield (
            id(parameter),
            _Weight(logical_name(name), region, read, stored_at, _name_logical(region, positions)),
        )


def _name_logical(region: Region, positions: Tensor) -> tuple[Tensor, ...]:
    """Return the logical coordinates of elements of a region, given by their row-major positions."""
    if region.flat is not None:
        return torch.unravel_index(positions + region.flat.start, region.shape)
    inside = torch.unravel_index(positions, region.local_shape)
    return tuple(torch.tensor(tuple(dim))[at] for dim, at in zip(region.dims, inside, strict=True))


def _locate(logical_at: Sequence[Tensor], region: Region) -> tuple[Tensor, ...] | None:
    """Return the coordinates of logical elements within a region; None if it lacks some."""
    found = []
    for at, dim in zip(logical_at, region.dims, strict=True):
        # `searchsorted` needs sorted values, and gives their number for an index beyond all of them.
        values, order = torch.sort(torch.tensor(tuple(dim)))
        place = torch.searchsorted(values, at.contiguous()).clamp(max=len(values) - 1)
        if not len(values) or not torch.equal(values[place], at):
            return None
        found.append(order[place])
    return tuple(found)


class GatheredWeights(Check[GatheredReport]):
    """Gathered weights at the start of every forward pass, against the stored shards."""

    name = CheckName.GATHERED_WEIGHTS
    role = Role.ORIGIN
    sees_inside = True

    def watch(self, run: RankRun, program: TrainingProgram) -> Watch[GatheredReport] | None:
        """Return a watch that compares the weights of each forward pass; see `Check`."""
        return GatheredWatch(program.model)

    def judge(self, shown: ShownTensors, reports: Sequence[GatheredReport]) -> CheckOutcome | None:
        """Return the verdict, with a finding for each largest wrong part of the model; see `Check`."""
        known = sorted({name for report in reports for name in report.names})
        if not known:
            return None
        wrong: dict[tuple[int, bool], dict[str, dict[int, StaleParameter]]] = {}
        for rank, report in enumerate(reports):
            for each in report.differences:
                by_name = wrong.setdefault((each.step, each.is_stale), {})
                by_name.setdefault(each.parameter, {})[rank] = each
        moved = set(known) - set().union(*(report.unmoved for report in reports))
        findings = [
            _make_finding(shown, module, members, len(known))
            for (_, is_stale), by_name in sorted(wrong.items())
            for module, members in join_by_module(by_name, moved if is_stale else known).items()
        ]
        return make_outcome(self.name, findings, len(known))


def _make_finding(
    shown: ShownTensors, module: str, members: Mapping[str, Mapping[int, StaleParameter]], num_known: int
) -> Finding:
    ranks = tuple(sorted({rank for by_rank in members.values() for rank in by_rank}))
    (name, by_rank), *_ = members.items()
    rank, first = min(by_rank.items())
    sources = _find_sources(members)
    code = Cause.STALE if first.is_stale else Cause.PERMUTATION if sources else ""
    return shown.make_finding(
        CheckName.GATHERED_WEIGHTS,
        (first.step, "", module or WHOLE),
        ranks,
        rank=rank,
        error=first.num_wrong / first.num_compared,
        index=first.index,
        expected=first.expected,
        actual=first.actual,
        code=code,
        facts=GatheredFacts(
            module=module,
            parameter=name,
            num_parameters=len(members),
            num_known=num_known,
            dtype=first.dtype,
            num_wrong=first.num_wrong,
            num_compared=first.num_compared,
            is_stale=first.is_stale,
            sources=sources,
        ),
        place=Place(module=module, ranks=ranks),
    )


def _find_sources(members: Mapping[str, Mapping[int, StaleParameter]]) -> tuple[tuple[int, int], ...]:
    """Return (rank, other rank) pairs: the rank used the values that the other one stores; else nothing.

    Only ranks with parts of equal size can match: they compare elements at the same positions of their
    parts.
    """
    found: dict[int, set[int]] = {}
    for by_rank in members.values():
        owners: dict[tuple[int | None, int], int] = {}
        for rank, each in by_rank.items():
            owners.setdefault((each.stored, each.num_compared), rank)
        for rank, each in by_rank.items():
            other = owners.get((each.used, each.num_compared))
            if other is None or each.used is None:
                return ()
            found.setdefault(rank, set()).add(other)
    if any(len(others) > 1 for others in found.values()):
        return ()
    return tuple((rank, min(others)) for rank, others in sorted(found.items()))


CHECKS = (GatheredWeights(),)
