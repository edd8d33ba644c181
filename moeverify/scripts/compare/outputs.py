"""Comparison of module inputs and outputs between two runs, for the same rows of the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from moeverify.parallel.regions.region import Region
from moeverify.report.words.script import describe_inner_differences
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.finding import Finding
from moeverify.results.operation import Altered
from moeverify.results.place import Place, Stage
from moeverify.scripts.record.lines import Output
from moeverify.scripts.record.model import ROOT
from moeverify.scripts.record.read import RankRecord, RecordedRun
from moeverify.scripts.record.tensors import make_region
from moeverify.verification.checks.base import CheckOutcome
from moeverify.verification.compare.comparison import ComparedShard
from moeverify.verification.compare.difference import TensorDifference, measure

RowKey = tuple[int, ...]  # hashes of a row, one per input of the model

# One of this many tokens may have any value: a router may choose another expert where rounding decides.
_TOKENS_LEFT_OUT = 50

# Ratio of a module's output error to its input error (at least one rounding) that rounding cannot cause.
_JUMP = 8.0


class Spot(NamedTuple):
    """The input or output of a module in one of its calls within a forward pass."""

    module: str
    call: int
    is_input: bool

    @property
    def label(self) -> str:
        """Return the name of the spot in findings."""
        return f"{self.module}{' input' * self.is_input}{f' (call {self.call})' * (self.call > 1)}"


def list_spots(run: RecordedRun, step: int) -> list[Spot]:
    """Return the inputs and outputs at a step, in the order of the first forward pass."""
    return list(dict.fromkeys(_spot(line) for line in run.ranks[0].outputs if line.step == step))


@dataclass
class OutputComparer:
    """A comparison, row by row, of module inputs and outputs between `actual` and `expected`."""

    expected: RecordedRun
    actual: RecordedRun
    _keys: dict[tuple[int, int, int, int], list[RowKey]] = field(default_factory=dict)
    _halves: dict[tuple[int, str], list[float]] = field(default_factory=dict)  # see `_add_half`

    def compare(self, step: int) -> list[list[ComparedShard]]:
        """Return the entries of every rank at a step. A module without common rows has none."""
        known = self._index(step)
        by_rank: list[list[ComparedShard]] = []
        for rank in self.actual.ranks:
            lines = (line for line in rank.outputs if line.step == step)
            found = (self._compare(rank, line, known.get(_spot(line), {})) for line in lines)
            by_rank.append([entry for entry in found if entry is not None])
        return by_rank

    def find_jumps(self, step: int, unit: float) -> frozenset[str]:
        """Return the modules at a step whose outputs differ in most tokens although their inputs do not.

        In 16 bits the bound of an output is wide, and a residual stream dilutes the contribution of one
        block. The error of a wrong block may then stay below the bound. `unit` is a unit of rounding. Only
        modules whose input was compared can be found. The half of the tokens that differs most is ignored,
        so that a router's choice of other experts does not count.
        """
        errors = {
            label: math.sqrt(error / norm)
            for (at, label), (error, norm) in self._halves.items()
            if at == step and norm
        }
        found = set()
        for spot in {_spot(line) for rank in self.actual.ranks for line in rank.outputs if line.step == step}:
            source = errors.get(spot._replace(is_input=True).label)
            if (
                not spot.is_input
                and source is not None
                and errors.get(spot.label, 0.0) > _JUMP * max(source, unit)
            ):
                found.add(spot.label)
        return frozenset(found)

    def _add_half(self, step: int, label: str, expected: Tensor, local: Tensor) -> None:
        """Add the squared error and norm of the half of the tokens that differs least."""
        errors = (local - expected).square().sum(-1)
        kept = errors.argsort()[: (len(errors) + 1) // 2]
        total = self._halves.setdefault((step, label), [0.0, 0.0])
        total[0] += float(errors[kept].sum())
        total[1] += float(expected[kept].square().sum())

    def _index(self, step: int) -> Mapping[Spot, Mapping[RowKey, tuple[RankRecord, Output, int]]]:
        """Return the location of each row of each input and output in the expected run."""
        found: dict[Spot, dict[RowKey, tuple[RankRecord, Output, int]]] = {}
        for rank in self.expected.ranks:
            for line in rank.outputs:
                region = make_region(line.where)
                if line.step == step and region.is_whole:
                    rows = found.setdefault(_spot(line), {})
                    for number, key in enumerate(self._list_keys(self.expected, rank, line)):
                        rows.setdefault(key, (rank, line, number))
        return found

    def _list_keys(self, run: RecordedRun, rank: RankRecord, line: Output) -> list[RowKey]:
        """Return the key of each row of a tensor: the hashes of all inputs of the model."""
        place = (id(run), rank.rank, line.step)
        if (*place, line.forward) not in self._keys:
            inputs: dict[int, list[tuple[int, ...]]] = {}
            for rows in rank.rows:
                if rows.step == line.step:
                    inputs.setdefault(rows.forward, []).append(rows.rows)
            for forward, hashes in inputs.items():
                same = [each for each in hashes if len(each) == len(hashes[0])]
                self._keys[(*place, forward)] = list(zip(*same, strict=True))
        keys = self._keys.get((*place, line.forward), [])
        return keys if len(keys) == line.where.shape[0] else []

    def _compare(
        self, rank: RankRecord, line: Output, known: Mapping[RowKey, tuple[RankRecord, Output, int]]
    ) -> ComparedShard | None:
        keys = self._list_keys(self.actual, rank, line)
        numbers = [number for number, key in enumerate(keys) if key in known]
        if not numbers:
            return None
        sources = [known[keys[number]] for number in numbers]
        stride = max(line.stride, *(source.stride for _, source, _ in sources))
        local = rank.read_output(line)[numbers, :: stride // line.stride]
        rows = [
            owner.read_output(source)[number, :: stride // source.stride] for owner, source, number in sources
        ]
        if len({row.shape for row in rows}) > 1:
            return None
        pair = _align(torch.stack(rows).double(), local.double(), make_region(line.where), line)
        if pair is None:
            return None
        expected, local, part = pair
        spot, shape = _spot(line), tuple(local.shape)
        expected, local = (each.reshape(shape[0] * shape[1], -1) for each in (expected, local))
        self._add_half(line.step, spot.label, expected, local)
        difference = TensorDifference.from_statistics(measure(*_leave_out_tokens(expected, local)).tolist())
        # Rows of different passes are different parts of the batch.
        region = f"{hash(tuple(keys[number] for number in numbers)):x}:{part}"
        return ComparedShard(
            line.step,
            CheckName.ACTIVATIONS,
            spot.label,
            region,
            shape,
            shape,
            "compared",
            line.bits,
            difference,
        )


def _spot(line: Output) -> Spot:
    return Spot(line.name, line.call, line.is_input)


def _align(
    expected: Tensor, local: Tensor, region: Region, line: Output
) -> tuple[Tensor, Tensor, str] | None:
    """Return expected and local values of equal shape and the matched part of the rows, or None.

    A plain tensor that is smaller in one dim is matched to the nearest of the equal parts along that dim.
    Shapes: (rows, positions, ...), with the rows and positions of `local`.
    """
    if expected.ndim != local.ndim:
        return None
    if line.is_placed:
        return _take_placed(expected, local, region)
    unequal = [dim for dim in range(expected.ndim) if expected.shape[dim] != local.shape[dim]]
    if not unequal:
        return expected, local, "whole"
    dim = unequal[0]
    # With a stride, the positions between the stored ones are unknown.
    if len(unequal) > 1 or expected.shape[dim] % local.shape[dim] or (line.stride > 1 and dim == 1):
        return None
    parts = torch.split(expected, local.shape[dim], dim)
    errors = [float((part - local).square().sum()) for part in parts]
    best = min(range(len(parts)), key=errors.__getitem__)
    return parts[best], local, f"{dim}:{best}"


def _take_placed(expected: Tensor, local: Tensor, region: Region) -> tuple[Tensor, Tensor, str] | None:
    for dim, indices in enumerate(region.dims):
        # Dim 0 has only the rows of both runs. Positions are taken by region like the other dims.
        if dim > 0 and len(indices) == local.shape[dim] and len(indices) < region.shape[dim]:
            if expected.shape[dim] != region.shape[dim]:
                return None
            expected = expected.index_select(dim, torch.tensor(tuple(indices)))
    return (expected, local, region.key) if expected.shape == local.shape else None


def _leave_out_tokens(expected: Tensor, local: Tensor) -> tuple[Tensor, Tensor]:
    """Return both tensors without the 1/50 of the tokens that differ most; infinite errors are kept.

    Shapes: (tokens, features).
    """
    errors = (local - expected).square().sum(-1)
    num_left_out = len(errors) // _TOKENS_LEFT_OUT
    if not num_left_out:
        return expected, local
    order = torch.where(errors.isfinite(), errors, -1.0).argsort()
    kept = order[: len(order) - num_left_out]
    return expected[kept], local[kept]


def judge_outputs(
    outcome: CheckOutcome,
    spots: Sequence[Spot],
    compared: frozenset[str],
    find_jumps: Callable[[int], frozenset[str]] = lambda step: frozenset(),
) -> CheckOutcome:
    """Return the outcome with the first divergence as the origin of all others.

    An inner difference that does not reach the output of the surrounding module is not an error. An example
    is another order of dispatched tokens, or padding. `compared` has the labels of all compared spots.
    `find_jumps(step)` returns labels that count as different although they are within their bounds.
    """
    by_step: dict[int, set[str]] = {}
    for finding in outcome.findings:
        by_step.setdefault(finding.step, set()).add(finding.tensor)
    places = {spot.label: (number, spot) for number, spot in enumerate(spots)}
    kept = [
        finding
        for finding in outcome.findings
        if finding.tensor in places
        and _reaches_output(
            places[finding.tensor][1].module, by_step[finding.step] | find_jumps(finding.step), compared
        )
    ]
    result = outcome.result
    num_inner = len(outcome.findings) - len(kept)
    if num_inner:
        result = result.model_copy(update={"note": describe_inner_differences(num_inner)})
    if not kept:
        return CheckOutcome(result.model_copy(update={"verdict": "pass"}), ())
    kept.sort(key=lambda finding: (finding.step, places[finding.tensor][0]))
    first, *others = kept
    origin = _explain(first, places[first.tensor][1], by_step[first.step], compared)
    following = [finding.model_copy(update={"follows": first.tensor}) for finding in others]
    return CheckOutcome(result, (origin, *following))


def _list_around(module: str) -> Iterator[str]:
    """Yield the modules around a module, innermost first."""
    while module != ROOT:
        module = module.rpartition(".")[0] or ROOT
        yield module


def _reaches_output(module: str, differing: set[str], compared: frozenset[str]) -> bool:
    """Return whether the outputs of all compared surrounding modules differ too."""
    return all(each in differing for each in _list_around(module) if each in compared)


def _explain(finding: Finding, spot: Spot, differing: set[str], compared: frozenset[str]) -> Finding:
    """Explain the first divergence by the innermost module whose input was compared and matches."""
    candidates = _list_around(spot.module) if spot.is_input else (spot.module, *_list_around(spot.module))
    inputs = {each: Spot(each, spot.call, True).label for each in (spot.module, *_list_around(spot.module))}
    culprit = next(
        (each for each in candidates if inputs[each] in compared and inputs[each] not in differing), ROOT
    )
    inner = "" if culprit == spot.module else spot.module
    subject = Subject(quantity=Quantity.OUTPUT, tensors=(spot.label,), module=culprit, inner=inner)
    explanation = Explanation(cause=Cause.FORWARD, subject=subject, operation=Altered())
    return finding.model_copy(
        update={
            "code": explanation.cause.value,
            "explanation": explanation,
            "place": Place(module=culprit, ranks=finding.ranks, stage=Stage.FORWARD),
        }
    )
