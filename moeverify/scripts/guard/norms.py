"""Check that the norm in a gradient clip is the norm of the ranks' gradients. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from moeverify.results.finding import Finding, make_finding
from moeverify.results.guard import GuardCheck, OwnNormFacts
from moeverify.results.script import NormFacts
from moeverify.scripts.guard.lines import StepRecord
from moeverify.scripts.guard.replicas import ReplicaSet, is_expert
from moeverify.scripts.record.norm_parts import NormParts, choose_error, find_shared_ratio

_SAME = 2e-4  # relative, for norms in float32
_OTHER = 2e-3  # relative difference above which the ranks' coefficients come from different norms
_TIMES = 2
_FEWEST, _MOST = 3, 8  # number of clipped steps that distinguish a constant limit from a wrong norm


@dataclass(frozen=True)
class _Clipped:
    """A step with clipped gradients: the coefficient, and the parts of the norm before the clip."""

    coefficient: float
    parts: NormParts


@dataclass
class NormRule:
    """A check of the norms of torch's clip, and of a script's own clip by its effect.

    torch's clip returns its norm. A script's own clip multiplies gradients by limit / norm. With the right
    norm, the coefficient times the norm is the same limit on every rank and in every step.
    """

    replicas: Sequence[ReplicaSet]
    unequal: Sequence[ReplicaSet]
    num_ranks: int
    _history: list[_Clipped] = field(default_factory=list)
    _streak: int = 0
    _is_done: bool = False

    def find(self, records: Mapping[int, StepRecord]) -> list[Finding]:
        """Return a finding if the norm of this step, or of the steps so far, is wrong."""
        if (
            self._is_done
            or not records
            or any(record.partial or not record.squares for record in records.values())
        ):
            return []
        before = {rank: dict(enumerate(record.before)) for rank, record in records.items()}
        if not self._agree(before):
            return []  # differing replicas have no defined norm; the rule for replicas reports them
        by_torch = any(record.clips for record in records.values())
        if not by_torch and _has_scaler(records):
            return []  # the loss scale determines the factor between two gradients
        finding = self._judge_torch(records) if by_torch else self._judge_own(records)
        self._is_done = finding is not None
        return [finding] if finding is not None else []

    def list_unjudged(self, records: Mapping[int, StepRecord]) -> list[str]:
        """Return the norms of this step that cannot be judged, with the reason."""
        found = []
        if any(record.partial for record in records.values()):
            found.append(
                "gradient norms: gradients are partial sums, or have other shards than their parameters"
            )
        if _has_scaler(records) and not any(record.clips for record in records.values()):
            found.append("norms of the script's own clip: the gradient scaler changes gradients too")
        return found

    def _agree(self, squares: Mapping[int, Mapping[int, float | None]]) -> bool:
        """Return whether the gradients of replicas have equal norms; `squares` are by rank and tensor."""
        for replicas in self.replicas:
            own = [squares.get(member.rank, {}).get(member.number) for member in replicas.members]
            found = [square for square in own if square is not None]
            if found and max(found) > min(found) * (1.0 + _OTHER):
                return False
        return True

    def _judge_torch(self, records: Mapping[int, StepRecord]) -> Finding | None:
        number = min(len(record.clips) for record in records.values())
        for place in range(number):
            clips = {rank: record.clips[place] for rank, record in records.items()}
            squares = {rank: clip.squares for rank, clip in clips.items()}
            if not self._agree(squares):
                continue  # a clip before gradients are reduced; the rule for calls reports it
            for rank, clip in clips.items():
                parts = self._split(squares, rank)
                claimed = clip.norm
                if (
                    claimed is None
                    or not math.isfinite(claimed)
                    or not math.isfinite(parts.norm)
                    or not parts.norm
                ):
                    continue
                if abs(claimed / parts.norm - 1.0) > self._bound():
                    if self._is_of_replicas(squares, rank, claimed, self._bound()):
                        return None
                    error = choose_error(parts.list_errors(self.num_ranks), claimed / parts.norm)
                    return _make_finding(records[rank], "norm", error, parts.norm, claimed)
        return None

    def _judge_own(self, records: Mapping[int, StepRecord]) -> Finding | None:
        coefficients = {rank: _find_coefficient(record) for rank, record in records.items()}
        known = {rank: value for rank, value in coefficients.items() if value is not None}
        if (
            len(known) < len(records)
            or min(known.values()) > 1.0 - _SAME
            or max(known.values()) > 1.0 + _SAME
        ):
            return None
        squares = {
            rank: {number: square / known[rank] ** 2 for number, square in enumerate(record.squares)}
            for rank, record in records.items()
        }
        lowest, highest = min(known, key=lambda rank: known[rank]), max(known, key=lambda rank: known[rank])
        ratio = known[highest] / known[lowest]
        if ratio > 1.0 + _OTHER:
            self._streak += 1
            if self._streak < _TIMES:
                return None
            low, high = self._split(squares, lowest), self._split(squares, highest)
            predicted = _local_norm(low) / _local_norm(high) if _local_norm(high) else 1.0
            residual = abs(predicted / ratio - 1.0)
            error = NormFacts(part="unknown", num_tensors=low.num_sharded, ratio=ratio, residual=residual)
            if known[highest] < 1.0 - _SAME and residual < _OTHER:
                error = error.model_copy(update={"part": "local"})
            return _make_finding(records[highest], "ranks", error, known[lowest], known[highest])
        self._streak = 0
        first = next(iter(records))
        self._history = [*self._history[1 - _MOST :], _Clipped(known[first], self._split(squares, first))]
        return self._judge_history(records[first])

    def _judge_history(self, record: StepRecord) -> Finding | None:
        """Return a finding if a wrong norm makes the limit equal in all steps and the right norm does not."""
        if len(self._history) < _FEWEST:
            return None
        right = [each.coefficient * each.parts.norm for each in self._history]
        if _spread(right) < 5 * _SAME:
            return None
        by_error: dict[tuple[str, float], list[tuple[NormFacts, float]]] = {}
        for each, limit in zip(self._history, right, strict=True):
            for facts, factor in each.parts.list_errors(self.num_ranks):
                by_error.setdefault((facts.part, facts.times), []).append((facts, factor * limit))
        fitting = [
            found
            for found in by_error.values()
            if len(found) == len(right) and _spread([limit for _, limit in found]) < _SAME
        ]
        if not fitting:
            return None
        facts, limit = fitting[0][-1]
        residual = _spread([value for _, value in fitting[0]])
        if len(fitting) > 1:
            # Twice one part and half the other fit equally well, because the limit is unknown.
            facts = NormFacts(part="unknown")
        error = facts.model_copy(update={"ratio": limit / right[-1], "residual": residual})
        norm = self._history[-1].parts.norm
        return _make_finding(record, "coefficient", error, norm, norm * error.ratio)

    def _split(self, squares: Mapping[int, Mapping[int, float]], rank: int) -> NormParts:
        """Return the parts of the norm, counting each region once, of the gradients that any rank clipped."""
        replicated = sharded = local = 0.0
        names: dict[bool, set[str]] = {True: set(), False: set()}
        for replicas in self.replicas:
            found = [
                (member.rank, squares[member.rank][member.number])
                for member in replicas.members
                if member.number in squares.get(member.rank, {})
            ]
            if not found:
                continue
            is_everywhere = len(replicas.members) == self.num_ranks and replicas.tensor.is_whole
            names[is_everywhere].add(replicas.name)
            if is_everywhere:
                replicated += found[0][1]
            else:
                sharded += found[0][1]
                local += next((square for owner, square in found if owner == rank), 0.0)
        return NormParts(replicated, sharded, local, len(names[True]), len(names[False]))

    def _is_of_replicas(
        self, squares: Mapping[int, Mapping[int, float]], rank: int, claimed: float, bound: float
    ) -> bool:
        """Return whether a norm is right if some of the unequal tensors are replicas and others are parts.

        Experts are parts. If there are no other unequal tensors, no norm is explained by this.
        """
        others = {each.name for each in self.unequal if not is_expert(each.name)}
        if not others or len(others) == len(self.unequal):
            return False
        total = 0.0
        for replicas in self.replicas:
            found = [
                squares[member.rank][member.number]
                for member in replicas.members
                if member.number in squares.get(member.rank, {})
                and (replicas.name not in others or member.rank == rank)
            ]
            total += found[0] if found else 0.0
        return total > 0.0 and abs(claimed / math.sqrt(total) - 1.0) <= bound

    def _bound(self) -> float:
        """Return the tolerated relative difference of two computations of a norm, by the gradients' dtypes.

        The clip rounds each tensor's norm to the gradients' dtype, and the sum of squares over each mesh.
        """
        eps = max((each.tensor.eps for each in self.replicas), default=0.0)
        return max(_SAME, eps * (8.0 + self.num_ranks))


def _has_scaler(records: Mapping[int, StepRecord]) -> bool:
    return any(call.name.startswith("scaler") for record in records.values() for call in record.calls)


def _find_coefficient(record: StepRecord) -> float | None:
    pairs = zip(record.squares, record.before, strict=True)
    return find_shared_ratio(
        math.sqrt(after / before)
        for after, before in pairs
        if before and after > 0.0 and math.isfinite(after / before)
    )


def _local_norm(parts: NormParts) -> float:
    return math.sqrt(parts.replicated + parts.local)


def _spread(values: Iterable[float]) -> float:
    found = list(values)
    return max(found) / min(found) - 1.0 if min(found) > 0.0 else math.inf


def _make_finding(
    record: StepRecord, source: str, error: NormFacts, expected: float, actual: float
) -> Finding:
    return make_finding(
        GuardCheck.NORM,
        "total",
        record.step,
        (record.rank,),
        OwnNormFacts.model_validate({"source": source, "error": error}),
        error=abs(actual / expected - 1.0) if expected else math.inf,
        bound=_SAME,
        expected=expected,
        actual=actual,
    )
