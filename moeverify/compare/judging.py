"""From what every rank measured to the verdict of each check, with a finding for everything out of bounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from moeverify.compare.bounds import Bounds
from moeverify.compare.comparison import Entry
from moeverify.compare.difference import Difference
from moeverify.results.checks import CHECKS, KIND_ORDER, Check, check_of
from moeverify.results.finding import BLIND, CheckResult, Finding, Worst

Key = tuple[int, str, str]  # step, kind, name
Coordinates = Mapping[int, Mapping[str, int]]


@dataclass
class Assembled:
    """What all ranks say about one logical tensor: (rank, entry), and the difference over distinct regions."""

    key: Key
    pieces: list[tuple[int, Entry]] = field(default_factory=list)

    @property
    def distinct(self) -> dict[str, tuple[int, Entry]]:
        """Return, for each region, the replica that differs most from the golden."""
        worst: dict[str, tuple[int, Entry]] = {}
        for rank, entry in self.pieces:
            if entry.state == "absent" and entry.region in worst:
                continue
            best = worst.get(entry.region)
            if best is None or _size(entry) > _size(best[1]):
                worst[entry.region] = (rank, entry)
        return worst

    def difference(self) -> Difference:
        """Return the difference over the whole logical tensor."""
        parts = [entry.difference for _, entry in self.distinct.values()]
        total = parts[0]
        for part in parts[1:]:
            total = total.merge(part)
        return total

    def worst_piece(self) -> tuple[int, Entry]:
        """Return the piece that differs most, by its largest element."""
        return max(self.pieces, key=lambda piece: _largest(piece[1]))

    def differing_ranks(self) -> tuple[int, ...]:
        """Return the ranks that hold a hundredth of the worst rank's squared error or more."""
        most = max(_size(entry) for _, entry in self.pieces)
        return tuple(rank for rank, entry in self.pieces if most > 0 and _size(entry) >= 0.01 * most)


@dataclass(frozen=True)
class Judgement:
    """The results of some checks and everything that they found."""

    checks: tuple[CheckResult, ...]
    findings: tuple[Finding, ...]


def assemble(by_rank: Sequence[Iterable[Entry]]) -> dict[Key, Assembled]:
    """Return what all ranks say, by logical tensor, in the order of a training step."""
    found: dict[Key, Assembled] = {}
    for rank, entries in enumerate(by_rank):
        for entry in entries:
            key = (entry.step, entry.kind, entry.name)
            found.setdefault(key, Assembled(key)).pieces.append((rank, entry))
    return dict(sorted(found.items(), key=lambda item: (item[0][0], KIND_ORDER[item[0][1]])))


def judge(assembled: Mapping[Key, Assembled], bounds: Bounds, coordinates: Coordinates) -> Judgement:
    """Return the verdicts of all comparisons with the golden, one for each check that had something to compare."""
    norms = _kind_norms(assembled)
    worst: dict[str, tuple[float, Worst]] = {}
    counts: dict[str, int] = {}
    blind: dict[str, int] = {}
    findings: list[Finding] = []
    for key, tensor in assembled.items():
        check = check_of(key[1])
        error, bound = _measure(tensor, bounds, norms[_unit(key)], check)
        counts[check.name] = counts.get(check.name, 0) + 1
        blind[check.name] = blind.get(check.name, 0) + (check.metric == "relative" and bound > BLIND)
        ratio = _ratio(error, bound)
        if check.name not in worst or ratio > worst[check.name][0]:
            worst[check.name] = (ratio, Worst(tensor=key[2], error=error, bound=bound, step=key[0]))
        if not error <= bound:
            findings.append(_describe(tensor, check, error, bound, coordinates))
    failed = {finding.check for finding in findings}
    checks = tuple(
        CheckResult(
            name=check.name,
            verdict="mismatch" if check.name in failed else "pass",
            tensors=counts[check.name],
            worst=worst[check.name][1],
            blind=blind[check.name],
        )
        for check in CHECKS
        if check.name in counts
    )
    return Judgement(checks, tuple(findings))


def _measure(tensor: Assembled, bounds: Bounds, kind_norm: float, check: Check) -> tuple[float, float]:
    """Return (error, bound) in the unit of the check's metric."""
    step, kind, name = tensor.key
    difference = tensor.difference()
    norm = math.sqrt(difference.sum_expected2)
    if difference.num_nonfinite:
        return math.inf, bounds.bound(step, kind, name, norm, kind_norm)
    if check.metric == "largest":
        return difference.max_error, bounds.bound(step, kind, name, norm, kind_norm)
    if norm == 0.0 and difference.sum_error2 > 0.0 and kind_norm > 0.0 and not check.exact:
        return math.sqrt(difference.sum_error2) / kind_norm, bounds.zero_bound()
    return difference.relative_error, bounds.bound(step, kind, name, norm, kind_norm)


def _kind_norms(assembled: Mapping[Key, Assembled]) -> dict[Key, float]:
    squares: dict[Key, float] = {}
    for key, tensor in assembled.items():
        squares[_unit(key)] = squares.get(_unit(key), 0.0) + tensor.difference().sum_expected2
    return {key: math.sqrt(total) for key, total in squares.items()}


def _unit(key: Key) -> Key:
    """Return what is equal for tensors of one step and kind that are measured in one unit.

    A step counter, a first and a second moment of the optimizer differ by ten orders of magnitude: beside the
    counters, all second moments would be rounding.
    """
    step, kind, name = key
    return step, kind, name.rpartition(".")[2] if kind == "optimizer_state" else ""


def _describe(
    tensor: Assembled, check: Check, error: float, bound: float, coordinates: Coordinates
) -> Finding:
    step, kind, name = tensor.key
    rank, entry = tensor.worst_piece()
    difference = tensor.difference()
    states = {piece.state for _, piece in tensor.pieces}
    evidence = []
    if "absent" in states:
        ranks = [rank for rank, piece in tensor.pieces if piece.state == "absent"]
        evidence.append(f"the run has no such tensor on ranks {_list(ranks)}")
    if "unexpected" in states:
        evidence.append("the golden has no such tensor")
    if difference.num_nonfinite:
        evidence.append(f"{difference.num_nonfinite:.0f} elements are not finite")
    return Finding(
        check=check.name,
        tensor=name,
        kind=kind,
        step=step,
        rank=rank,
        ranks=tensor.differing_ranks(),
        coordinates=dict(coordinates.get(rank, {})),
        error=error,
        bound=bound,
        scale=difference.scale,
        cosine=difference.cosine,
        index=entry.index,
        expected=entry.difference.expected_at,
        actual=entry.difference.actual_at,
        evidence=tuple(evidence),
    )


def _size(entry: Entry) -> float:
    return math.inf if entry.difference.num_nonfinite else entry.difference.sum_error2


def _largest(entry: Entry) -> float:
    return math.inf if entry.difference.num_nonfinite else entry.difference.max_error


def _ratio(error: float, bound: float) -> float:
    if bound > 0.0:
        return error / bound
    return math.inf if error > 0.0 else 0.0


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
