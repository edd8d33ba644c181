"""Detection of shards that should be equal across ranks, and of differences between them. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moeverify.results.finding import Finding
from moeverify.results.guard import DriftFacts, GuardCheck
from moeverify.scripts.guard.lines import RankHeader, StepRecord, TensorLine

_ROUNDING = (
    16 * 2.0**-24
)  # of float32 sums in another order on each rank; a constant error that does not grow abruptly
_SAME_SQUARE = 1e-6  # relative, for sums of squares from equal computations
_MAIN = 1e-2  # relative to the largest distance
_NARROW = 2.0**-20  # a larger epsilon is that of a 16-bit dtype, where any difference counts


@dataclass(frozen=True)
class Member:
    """A shard: its rank, and its number among the rank's tensors."""

    rank: int
    number: int


@dataclass
class ReplicaSet:
    """A set of shards that should have equal values."""

    name: str
    tensor: TensorLine
    members: list[Member] = field(default_factory=list)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that hold the shards."""
        return tuple(member.rank for member in self.members)


def find_replicas(
    headers: Mapping[int, RankHeader], first: Mapping[int, StepRecord]
) -> tuple[list[ReplicaSet], list[ReplicaSet]]:
    """Return sets of shards that should be equal, and sets of one name with different initial values.

    DTensors of one mesh with the same region are replicas. Plain tensors of one name and shape, and
    DTensors of several meshes, are replicas if their initial values are equal. Others may be parts, such as
    a rank's experts, or replicas that were seeded differently. Their gradients distinguish the two.
    """
    by_place: dict[object, list[tuple[Member, TensorLine, int]]] = {}
    for rank, header in headers.items():
        began = first[rank].began if rank in first else ()
        for number, (tensor, bits) in enumerate(zip(header.tensors, began, strict=False)):
            place = (tensor.name, tensor.shape, tensor.region)
            by_place.setdefault(place, []).append((Member(rank, number), tensor, bits))
    equal: list[ReplicaSet] = []
    unequal: list[ReplicaSet] = []
    for shards in by_place.values():
        sets: dict[object, ReplicaSet] = {}
        for member, tensor, bits in shards:
            key = next((known for known in sets if _belongs(known, tensor, bits)), (tensor.mesh, bits))
            sets.setdefault(key, ReplicaSet(tensor.name, tensor)).members.append(member)
        equal += sets.values()
        if len(sets) > 1:
            one = next(iter(sets.values()))
            everyone = [member for each in sets.values() for member in each.members]
            unequal.append(ReplicaSet(one.name, one.tensor, everyone))
    return equal, unequal


def _belongs(known: object, tensor: TensorLine, bits: int) -> bool:
    assert isinstance(known, tuple)
    mesh, began = known
    return began == bits or bool(tensor.mesh and mesh == tensor.mesh)


@dataclass
class ReplicaRule:
    """A check for replicas that drift or were never equal; it reports once, as everything differs later."""

    equal: Sequence[ReplicaSet]
    unequal: Sequence[ReplicaSet]
    _is_done: bool = False
    _num_same_gradients: dict[str, int] = field(default_factory=dict)

    def find(self, records: Mapping[int, StepRecord]) -> list[Finding]:
        """Return a finding for each set of ranks whose replicas began to differ in this step."""
        if self._is_done:
            return []
        found: dict[object, list[tuple[ReplicaSet, float]]] = {}
        for replicas in self.equal:
            distance = _measure(replicas, records)
            if distance > (_ROUNDING if replicas.tensor.eps < _NARROW else 0.0):
                gradients = _compare_gradients(replicas, records)
                key = (replicas.ranks, gradients, is_expert(replicas.name), "update")
                found.setdefault(key, []).append((replicas, distance))
        for replicas in self.unequal:
            # Gradients that are bitwise equal and nonzero were reduced over these ranks.
            if _compare_gradients(replicas, records) == "equal":
                times = self._num_same_gradients[replicas.name] = (
                    self._num_same_gradients.get(replicas.name, 0) + 1
                )
                if times == 2:
                    key = (replicas.ranks, "equal", is_expert(replicas.name), "start")
                    found.setdefault(key, []).append((replicas, _measure(replicas, records)))
        self._is_done = bool(found)
        largest = max((distance for sets in found.values() for _, distance in sets), default=0.0)
        # Small differences are consequences of the wrong tensor, through a norm over all tensors for
        # example.
        found = {key: [each for each in sets if each[1] >= _MAIN * largest] for key, sets in found.items()}
        step = next(iter(records.values())).step
        return [_make_finding(step, key, sets) for key, sets in found.items() if sets]

    def has_unequal_replicas(self, records: Mapping[int, StepRecord]) -> bool:
        """Return whether tensors with different initial values get equal gradients: parts are unknown."""
        return any(_compare_gradients(replicas, records) == "equal" for replicas in self.unequal)


def _measure(replicas: ReplicaSet, records: Mapping[int, StepRecord]) -> float:
    """Return the largest distance between replicas relative to their norm; 0 if all are bitwise equal."""
    values = [
        (records[member.rank].ended[member.number], member)
        for member in replicas.members
        if member.rank in records and member.number < len(records[member.rank].ended)
    ]
    present = [(bits, member) for bits, member in values if bits]
    if len({bits for bits, _ in present}) < 2:
        return 0.0
    distance = 0.0
    first = present[0][1]
    base = records[first.rank].projections[first.number]
    norm = max(records[member.rank].norms[member.number] for _, member in present)
    for _, member in present[1:]:
        other = records[member.rank].projections[member.number]
        squares = [(one - two) ** 2 for one, two in zip(base, other, strict=True)]
        distance = max(distance, math.sqrt(sum(squares) / len(squares)))
    if not math.isfinite(distance) or not math.isfinite(norm):
        return 0.0  # another rule reports NaN
    return distance / norm if norm else 1.0


def _compare_gradients(replicas: ReplicaSet, records: Mapping[int, StepRecord]) -> str:
    gradients = [
        (records[member.rank].gradients[member.number], records[member.rank].squares[member.number])
        for member in replicas.members
        if member.rank in records and records[member.rank].gradients
    ]
    if len(gradients) < 2 or any(not bits or not square > 0.0 for bits, square in gradients):
        return "unknown"
    if len({bits for bits, _ in gradients}) == 1:
        return "equal"
    before = [
        records[member.rank].before[member.number] for member in replicas.members if member.rank in records
    ]
    known = [square for square in before if square is not None]
    is_same = len(known) == len(before) and max(known) <= min(known) * (1.0 + _SAME_SQUARE)
    return "clipped apart" if is_same else "differ"


def is_expert(name: str) -> bool:
    """Return whether a parameter belongs to one of several experts, judged by its FQN."""
    return any("expert" in part and "shared" not in part for part in name.split("."))


def _make_finding(step: int, key: object, sets: Sequence[tuple[ReplicaSet, float]]) -> Finding:
    assert isinstance(key, tuple)
    ranks, gradients, are_experts, since = key
    distance = max(each for _, each in sets)
    return Finding(
        check=GuardCheck.REPLICAS,
        tensor=sets[0][0].name,
        step=step,
        rank=ranks[-1],
        ranks=ranks,
        error=distance,
        bound=0.0,
        facts=DriftFacts(
            names=tuple(replicas.name for replicas, _ in sets),
            since=since,
            gradients=gradients,
            distance=distance,
            are_experts=are_experts,
        ),
    )
