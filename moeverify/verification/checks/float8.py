"""Check of the scales and numbers of float8 operands and products.

A wrong scale is divided out again, so the result has no wrong factor. It changes the rounding or cuts off
large values, and the comparison with the golden loses that in the rounding of float8 itself. This check uses
neither golden nor noise. Where torchao rounded an operand, the check recomputes its largest elements, rounds
some of its numbers again, and recomputes some elements of each product (`float8_products`).

If an operand is sharded over tp along the dims that share a scale, that scale belongs to the largest
element on all tp ranks. Operands of other data-parallel ranks do not matter.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from moeverify.model.float8 import FORMATS, list_layers, scale_of
from moeverify.model.float8_scaling import FLOAT8
from moeverify.parallel.regions.local_shard import logical_name
from moeverify.parallel.regions.placement import local_part
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName
from moeverify.results.facts import Float8Facts, ScaleSource
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
from moeverify.verification.checks.float8_products import (
    Float8Comparison,
    ProductTap,
    SampledProduct,
    compare_operand,
    compare_product,
    list_wrong,
)
from moeverify.verification.checks.narrower import name_dtype
from moeverify.verification.checks.precision import WHOLE, join_by_module

MOST_SCALES = 16
"""Maximum number of evenly spaced scales recomputed per operand."""

BOUND = 2.0**-20
"""Relative tolerance of a scale: scales are computed in float64 and stored in float32."""

_CODES: Mapping[ScaleSource, Cause] = {
    "own-rank": Cause.MISSING_REDUCTION,
    "step-before": Cause.STALE,
    "none": Cause.PRECISION,
}

_ByLayer = dict[str, dict[int, list[Float8Facts]]]  # by layer and rank
Key = tuple[str, str, int]  # layer, operand, and number of earlier uses of this operand in the step


@dataclass(frozen=True)
class Operand:
    """Scales of an operand as `used`, and the `largest` elements they should derive from, on one rank.

    If the operand is sharded over `axis`, `ranks` hold its parts. `before` are the largest elements of the
    same operand in the previous step. `other` names another operand of this rank whose scales were used.
    """

    step: int
    key: Key
    dtype: str
    largest: tuple[float, ...]
    used: tuple[float, ...]
    ranks: tuple[int, ...] = ()
    axis: str = ""
    before: tuple[float, ...] = ()
    other: str = ""


@dataclass(frozen=True)
class Float8Report:
    """Float8 layers of a rank, and the operands that rank 0 must judge.

    - `layers`: the layers that should be in float8.
    - `seen`: the layers that were.
    - `operands`: all sharded operands, and the others with a wrong scale.
    - `wrong`: operands and products with wrong numbers, each with its step.
    - `num_operands`, `num_products`: the numbers of operands and products in all steps.
    """

    layers: tuple[str, ...]
    seen: frozenset[str]
    num_operands: int
    operands: tuple[Operand, ...]
    wrong: tuple[tuple[int, Float8Facts], ...] = ()
    num_products: int = 0


class Float8Watch(Watch[Float8Report]):
    """Records every operand that torchao rounds to float8, and judges a step when it is over."""

    def __init__(self, model: nn.Module, *, power_of_two: bool) -> None:
        from torchao.float8 import float8_scaling_utils as library

        self._power_of_two = power_of_two
        self._names, self._layers = name_layers(model)
        self._library = library
        self._original: Any = library.hp_tensor_and_scale_to_float8
        self._signature = inspect.signature(self._original)
        library.hp_tensor_and_scale_to_float8 = self._round
        self._tap = ProductTap(self._layers, self._hear)
        self._compared: list[Float8Comparison] = []
        self._wrong: list[tuple[int, Float8Facts]] = []
        self._num_products = 0
        self._step, self._num_operands = -1, 0
        self._looked: dict[Key, tuple[Tensor, Tensor, Operand]] = {}
        self._visits: Counter[tuple[str, str]] = Counter()
        self._before: dict[Key, tuple[float, ...]] = {}
        self._seen: set[str] = set()
        self._found: list[Operand] = []

    def begin_step(self, step: int) -> None:
        """Judge the previous step; see `Watch`."""
        self._finish()
        self._step = step

    def close(self) -> None:
        """Judge the last step and restore torchao; see `Watch`."""
        self._finish()
        # `==`, since each access makes another bound method. A function that was put there later stays.
        if self._library.hp_tensor_and_scale_to_float8 == self._round:
            self._library.hp_tensor_and_scale_to_float8 = self._original
        self._tap.close()

    def report(self) -> Float8Report:
        """Return the report of all steps; see `Watch`."""
        return Float8Report(
            self._names,
            frozenset(self._seen),
            self._num_operands,
            tuple(self._found),
            tuple(self._wrong),
            self._num_products,
        )

    def _round(self, *arguments: Any, **named: Any) -> Any:
        rounded = self._original(*arguments, **named)
        given = self._signature.bind(*arguments, **named)
        given.apply_defaults()
        with torch.no_grad():
            local: Any = local_part(rounded)  # a torchao tensor subclass
            self._look(given.arguments, local)
        return rounded

    def _hear(self, layer: str, product: SampledProduct) -> None:
        self._compared.append(compare_product(layer, product))
        self._num_products += 1

    def _look(self, given: Mapping[str, Any], rounded: Any) -> None:
        layer = self._layers.get(id(given["linear_mm_config"]))
        operand, dim = given["hp_tensor"].detach(), given["axiswise_dim"]
        local = local_part(operand)
        if layer is None or not local.numel():
            return
        self._seen.add(layer)
        role = given["gemm_input_role"].value
        self._compared.append(compare_operand(layer, role, local, rounded))
        largest, used = find_largest(local, dim), _choose(rounded._scale.reshape(-1))
        ranks, axis = _list_ranks(operand, dim)
        # An operand may be rounded with one scale, and again with one scale per row or column. These count
        # separately.
        # -1 and 1 are the same dim of a matrix.
        name = f"{role}{'' if dim is None else f' along dim {dim % 2}'}"
        key = (layer, name, self._visits[layer, name])
        self._visits[layer, name] += 1
        found = Operand(self._step, key, name_dtype(given["float8_dtype"]), (), (), ranks, axis)
        self._looked[key] = (largest, used, found)

    def _finish(self) -> None:
        looked, self._looked = self._looked, {}
        compared, self._compared = self._compared, []
        self._wrong += ((self._step, facts) for facts in list_wrong(compared))
        self._visits.clear()
        operands = {
            key: replace(
                found,
                largest=tuple(largest.to(torch.float64).tolist()),
                used=tuple(used.to(torch.float64).tolist()),
                before=self._before.get(key, ()),
            )
            for key, (largest, used, found) in looked.items()
        }
        self._num_operands += len(operands)
        for operand in operands.values():
            if operand.ranks:
                self._found.append(operand)
            elif find_wrong(operand.largest, operand, power_of_two=self._power_of_two):
                other = self._find_other(operand, operands.values())
                self._found.append(replace(operand, other=other))
        self._before = {key: operand.largest for key, operand in operands.items()}

    def _find_other(self, operand: Operand, operands: Collection[Operand]) -> str:
        """Return the name of the one other operand whose scales were used, or an empty string."""
        names = {
            f"{other.key[0]} {other.key[1]}"
            for other in operands
            if other.key != operand.key
            and len(other.largest) == len(operand.used)
            and not find_wrong(other.largest, operand, power_of_two=self._power_of_two)
        }
        return names.pop() if len(names) == 1 else ""


def name_layers(model: nn.Module) -> tuple[tuple[str, ...], dict[int, str]]:
    """Return the names of the float8 layers, and the names of torchao's layers by the id of their options.

    Every layer has an options object of its own, which torchao passes with each of its products.
    """
    names, by_options = [], {}
    for name, parent, attribute in list_layers(model):
        names.append(logical_name(f"{name}.weight").removesuffix(".weight"))
        options = getattr(getattr(parent, attribute), "linear_mm_config", None)
        if options is not None:
            by_options[id(options)] = names[-1]
    return tuple(names), by_options


def find_largest(operand: Tensor, dim: int | None) -> Tensor:
    """Return the largest elements for some scales of an operand: per slice along `dim`, or overall.

    Shape: (at most `MOST_SCALES`,).
    """
    if dim is None:
        return operand.abs().amax().reshape(1)
    return _choose(operand.movedim(dim, -1).flatten(0, -2)).abs().amax(dim=-1)


def _choose(rows: Tensor) -> Tensor:
    """Return at most `MOST_SCALES` evenly spaced rows."""
    return rows[:: max(1, -(-len(rows) // MOST_SCALES))]


def _list_ranks(operand: Tensor, dim: int | None) -> tuple[tuple[int, ...], str]:
    """Return the ranks and the axis over which an operand is sharded within one scale; else nothing."""
    if not isinstance(operand, DTensor):
        return (), ""
    is_cut = any(
        isinstance(placement, Shard) and (dim is None or placement.dim == dim % operand.ndim)
        for placement in operand.placements
    )
    mesh = operand.device_mesh
    return (tuple(mesh.mesh.flatten().tolist()), "-".join(mesh.mesh_dim_names or ())) if is_cut else ((), "")


def _find_dtype(name: str) -> torch.dtype:
    return next(dtype for dtype in FORMATS.values() if name_dtype(dtype) == name)


def find_wrong(largest: Sequence[float], operand: Operand, *, power_of_two: bool) -> list[int]:
    """Return the indices of an operand's scales that do not derive from these largest elements."""
    dtype = _find_dtype(operand.dtype)
    sizes = torch.tensor(largest, dtype=torch.float64)
    used = torch.tensor(operand.used, dtype=torch.float64)
    # A scale close to a power of two may be rounded to it, or down to the next one.
    wanted = [
        scale_of(sizes * (1.0 + step), dtype, power_of_two=power_of_two) for step in (-BOUND, 0.0, BOUND)
    ]
    right = torch.stack([(used / each - 1.0).abs() <= BOUND for each in wanted]).any(dim=0)
    # No scale is right for a non-finite operand. Other checks report it.
    return (~right & sizes.isfinite()).nonzero().flatten().tolist()


class Float8(Check[Float8Report]):
    """Scales of float8 operands, against the scales that their largest elements require."""

    name = CheckName.FLOAT8
    role = Role.ORIGIN

    def watch(self, run: RankRun, program: TrainingProgram) -> Watch[Float8Report] | None:
        """Return a watch of the operands; None if the recipe has no float8; see `Check`."""
        scaling = run.case.recipe.float8
        if scaling == "none":
            return None
        return Float8Watch(program.model, power_of_two=FLOAT8.find(scaling).power_of_two)

    def judge(self, shown: ShownTensors, reports: Sequence[Float8Report]) -> CheckOutcome | None:
        """Return the verdict, with a finding for each largest wrong part of the model; see `Check`."""
        if not reports:
            return None
        power_of_two = FLOAT8.find(shown.case.recipe.float8).power_of_two
        known = sorted({name for report in reports for name in report.layers})
        wrong: dict[ScaleSource, _ByLayer] = {}
        steps: dict[ScaleSource, int] = {}
        for rank, step, facts in _list_wrong(reports, power_of_two=power_of_two):
            if steps.setdefault(facts.source, step) == step:
                by_layer = wrong.setdefault(facts.source, {})
                by_layer.setdefault(facts.layer, {}).setdefault(rank, []).append(facts)
        findings = [
            _make_finding(shown, steps[source], module, members, len(known))
            for source, by_layer in wrong.items()
            for module, members in _join(source, by_layer, known)
        ]
        return make_outcome(
            self.name, findings, sum(report.num_operands + report.num_products for report in reports)
        )


def _list_wrong(
    reports: Sequence[Float8Report], *, power_of_two: bool
) -> Iterator[tuple[int, int, Float8Facts]]:
    """Yield (rank, step, facts) of each layer without float8 and each wrong operand or product."""
    cut: dict[tuple[int, Key, tuple[int, ...]], list[Operand]] = {}
    for report in reports:
        for operand in report.operands:
            cut.setdefault((operand.step, operand.key, operand.ranks), []).append(operand)
    for rank, report in enumerate(reports):
        for layer in report.layers:
            if layer not in report.seen:
                yield rank, 0, Float8Facts(layer=layer, source="none")
        for step, facts in report.wrong:
            yield rank, step, facts
    found = [(operand.step, rank, operand) for rank, each in enumerate(reports) for operand in each.operands]
    for step, rank, operand in sorted(found, key=lambda each: each[:2]):
        parts = cut[step, operand.key, operand.ranks] if operand.ranks else [operand]
        largest = [max(sizes) for sizes in zip(*(part.largest for part in parts), strict=True)]
        wrong = find_wrong(largest, operand, power_of_two=power_of_two)
        if wrong:
            yield rank, step, _describe(operand, largest, parts, wrong, power_of_two=power_of_two)


def _describe(
    operand: Operand,
    largest: Sequence[float],
    parts: Sequence[Operand],
    wrong: Sequence[int],
    *,
    power_of_two: bool,
) -> Float8Facts:
    dtype = _find_dtype(operand.dtype)
    before = [max(sizes) for sizes in zip(*(part.before for part in parts), strict=True)]
    source: ScaleSource = ""
    if operand.ranks and not find_wrong(operand.largest, operand, power_of_two=power_of_two):
        source = "own-rank"
    elif before and not find_wrong(before, operand, power_of_two=power_of_two):
        source = "step-before"
    elif operand.other:
        source = "another"
    wanted = scale_of(torch.tensor(largest, dtype=torch.float64), dtype, power_of_two=power_of_two)
    return Float8Facts(
        layer=operand.key[0],
        operand=operand.key[1].partition(" ")[0],
        source=source,
        other=operand.other,
        axis=operand.axis,
        num_wrong=len(wrong),
        num_compared=len(largest),
        used=operand.used[wrong[0]],
        wanted=float(wanted[wrong[0]]),
    )


def _join(source: ScaleSource, by_layer: _ByLayer, known: Sequence[str]) -> Iterator[tuple[str, _ByLayer]]:
    """Yield the wrong layers of one source, with the smallest module around them.

    Layers without float8 are reported where they are. A wrong scale may match by luck, for example on the
    rank with the largest element. Correct layers between wrong ones therefore do not narrow down the
    location of the bug.
    """
    if source == "none":
        yield from join_by_module(by_layer, known).items()
        return
    parts = zip(*(layer.split(".") for layer in by_layer), strict=False)
    common = (names[0] for names in takewhile(lambda names: len(set(names)) == 1, parts))
    module = ".".join(common)
    # A list of blocks computes nothing itself.
    yield ("" if module == "layers" else module), by_layer


def _measure(facts: Float8Facts) -> float:
    """Return the relative error of a scale; 1 if none could be compared."""
    error = abs(facts.used / facts.wanted - 1.0) if facts.wanted else math.inf
    return error if math.isfinite(error) and facts.source != "none" else 1.0


def _find_bound(facts: Float8Facts) -> float:
    """Return the allowed relative error of a value. Numbers in float8 are exact."""
    if facts.source in ("none", "numbers"):
        return 0.0
    return facts.allowed / abs(facts.wanted) if facts.source == "product" and facts.wanted else BOUND


def _make_finding(shown: ShownTensors, step: int, module: str, members: _ByLayer, num_known: int) -> Finding:
    ranks = tuple(sorted({rank for by_rank in members.values() for rank in by_rank}))
    found = [
        (rank, facts) for by_rank in members.values() for rank, each in by_rank.items() for facts in each
    ]
    rank, facts = max(found, key=lambda each: _measure(each[1]))
    operands = {facts.operand for _, facts in found}
    facts = facts.model_copy(
        update={
            "module": module,
            "operands": tuple(sorted(operands - {""})),
            "num_layers": len(members),
            "num_known": num_known,
        }
    )
    return shown.make_finding(
        CheckName.FLOAT8,
        (step, "", module or WHOLE),
        ranks,
        rank=rank,
        error=_measure(facts),
        bound=_find_bound(facts),
        code=_CODES.get(facts.source, Cause.PRECISION),
        facts=facts,
        place=Place(module=module, ranks=ranks, axes=(facts.axis,) if facts.source == "own-rank" else ()),
    )


CHECKS = (Float8(),)
