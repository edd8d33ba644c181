"""Detection of shards that should be equal across ranks, and of differences between them. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from moeverify.results.finding import Finding, make_finding
from moeverify.results.guard import DriftCause, DriftFacts, GuardCheck
from moeverify.scripts.guard.drift import find_cause, find_source
from moeverify.scripts.guard.lines import RankHeader, StepRecord, TensorLine, exchange_activations
from moeverify.scripts.guard.sequence import divides_heads, find_share

_ROUNDING = (
    16 * 2.0**-24
)  # of float32 sums in another order on each rank; a constant error that does not grow abruptly
_SAME_SQUARE = 1e-6  # relative, for sums of squares from equal computations
_MAIN = 1e-2  # relative to the largest distance
_TIMES = 2  # sampled steps
_Gradients = Literal["equal", "differ", "clipped apart", "unknown"]
_Key = tuple[tuple[int, ...], _Gradients, bool, Literal["start", "update"]]  # with whether these are experts
_NARROW = 2.0**-20  # a larger epsilon belongs to a 16-bit dtype, where any difference counts


@dataclass(frozen=True)
class ShardId:
    """A shard: its rank, and its number among the rank's tensors."""

    rank: int
    number: int


@dataclass(frozen=True)
class Shard:
    """A shard with its description, and the hash of its initial values."""

    member: ShardId
    tensor: TensorLine
    bits: int


@dataclass
class ReplicaSet:
    """A set of shards that should have equal values."""

    name: str
    tensor: TensorLine
    members: list[ShardId] = field(default_factory=list)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that hold the shards."""
        return tuple(sorted(member.rank for member in self.members))


def find_replicas(
    headers: Mapping[int, RankHeader],
    first: Mapping[int, StepRecord],
    stages: Mapping[int, int] | None = None,
) -> tuple[list[ReplicaSet], list[ReplicaSet]]:
    """Return sets of shards that should be equal, and sets of one name with different initial values.

    DTensors of one mesh with the same region are replicas. Plain tensors of one name and shape, and
    DTensors of several meshes, are replicas if their initial values are equal. Others may be parts, such as
    a rank's experts, or replicas that were seeded differently. Their gradients distinguish the two. Tensors
    of different pipeline `stages` are never replicas. Constant values, such as zero biases, are evidence
    only beside equal random values in the same module, or if the module has equal outputs for equal rows.
    """
    by_place: dict[object, list[Shard]] = {}
    for rank, header in headers.items():
        began = first[rank].began if rank in first else ()
        for number, (tensor, bits) in enumerate(zip(header.tensors, began, strict=False)):
            place = (tensor.name, tensor.shape, tensor.region, (stages or {}).get(rank, 0))
            by_place.setdefault(place, []).append(Shard(ShardId(rank, number), tensor, bits))
    evidence = ReplicaModules(headers, by_place.values(), first)
    equal: list[ReplicaSet] = []
    unequal: list[ReplicaSet] = []
    for shards in by_place.values():
        sets: dict[object, ReplicaSet] = {}
        for shard in shards:
            key = next((known for known in sets if _belongs(known, shard, sets, evidence)), None)
            own = (shard.tensor.mesh, shard.bits, shard.member.rank)
            new = ReplicaSet(shard.tensor.name, shard.tensor)
            sets.setdefault(own if key is None else key, new).members.append(shard.member)
        equal += sets.values()
        if len({bits for _, bits, _ in map(_read_key, sets)}) > 1:
            one = next(iter(sets.values()))
            everyone = [member for each in sets.values() for member in each.members]
            unequal.append(ReplicaSet(one.name, one.tensor, everyone))
    return equal, unequal


def find_tied(
    headers: Mapping[int, RankHeader], first: Mapping[int, StepRecord], stages: Mapping[int, int]
) -> list[ReplicaSet]:
    """Return whole matrices with equal random values in several pipeline stages, such as a tied embedding.

    Those of numbered layers are left out: they may begin with one pattern in every layer.
    """
    found: dict[object, list[Shard]] = {}
    for rank, header in headers.items():
        began = first[rank].began if rank in first else ()
        for number, (tensor, bits) in enumerate(zip(header.tensors, began, strict=False)):
            is_matrix = len(tensor.shape) > 1 and tensor.is_whole and tensor.is_varied
            if is_matrix and not any(part.isdigit() for part in tensor.name.split(".")):
                found.setdefault((tensor.shape, bits), []).append(Shard(ShardId(rank, number), tensor, bits))
    return [
        ReplicaSet(each[0].tensor.name, each[0].tensor, [shard.member for shard in each])
        for each in found.values()
        if len({stages.get(shard.member.rank, 0) for shard in each}) > 1
    ]


def _read_key(key: object) -> tuple[tuple[int, ...], int, int]:
    assert isinstance(key, tuple)
    mesh, bits, rank = key
    return mesh, bits, rank


def _belongs(
    known: object, shard: Shard, sets: Mapping[object, ReplicaSet], evidence: ReplicaModules
) -> bool:
    """Return whether a shard is a replica of those in a known set."""
    mesh, began, rank = _read_key(known)
    if shard.tensor.mesh and mesh == shard.tensor.mesh:
        return True
    if began != shard.bits:
        return False
    is_random = shard.tensor.is_varied or bool(shard.tensor.mesh)
    return is_random or evidence.is_replicated(shard.tensor.name, rank, shard.member.rank)


class ReplicaModules:
    """Ranks with equal random values, by module: of its own parameters, and of those below it too."""

    def __init__(
        self,
        headers: Mapping[int, RankHeader],
        places: Iterable[Sequence[Shard]],
        first: Mapping[int, StepRecord],
    ) -> None:
        self._headers = headers
        self._first = first
        # (module, whether parameters below it count) -> sets of ranks with equal values of one parameter
        self._equal: dict[tuple[str, bool], set[frozenset[int]]] = {}
        for shards in places:
            by_bits: dict[int, set[int]] = {}
            for shard in shards:
                if shard.tensor.is_varied:
                    by_bits.setdefault(shard.bits, set()).add(shard.member.rank)
            own, *enclosing = _list_enclosing(shards[0].tensor.name)
            for key in ((own, False), *((module, True) for module in (own, *enclosing))):
                self._equal.setdefault(key, set()).update(map(frozenset, by_bits.values()))
        self._holders = {key: frozenset().union(*sets) for key, sets in self._equal.items()}

    def is_replicated(self, name: str, one: int, two: int) -> bool:
        """Return whether random values nearby are equal on both ranks: of the same module, or around it.

        Ranks that one wrapper makes data-parallel need no such values.
        """
        for module in _list_enclosing(name):
            for key in ((module, False), (module, True)):
                if {one, two} <= self._holders.get(key, frozenset()):
                    is_equal = any({one, two} <= ranks for ranks in self._equal[key])
                    return is_equal or self._has_equal_use(name, one, two)
        return two in self._headers[one].data_ranks

    def _has_equal_use(self, name: str, one: int, two: int) -> bool:
        """Return whether a module of two ranks with the same rows has equal outputs, or divides other dims.

        A vector that a module applies to a part of the positions or heads is the same for the other parts.
        """
        module = name.rpartition(".")[0]
        lines = (line for line in self._headers[one].tensors if line.name == name)
        if any(len(line.shape) == 1 for line in lines) and not is_expert(name):
            place = name, (one, two), self._headers, self._first
            if find_share(*place) or (self._is_constant(module, one) and divides_heads(*place)):
                return True
        return self._is_constant(module, one) and self._has_equal_outputs(module, one, two)

    def _is_constant(self, module: str, rank: int) -> bool:
        lines = self._headers[rank].tensors
        return not any(line.is_varied and line.name.startswith(f"{module}.") for line in lines)

    def _has_equal_outputs(self, module: str, one: int, two: int) -> bool:
        """Return whether a module has the same outputs on two ranks with the same rows."""
        records = [self._first[rank] for rank in (one, two) if rank in self._first]
        outputs = [[value for name, value in record.outputs if name == module] for record in records]
        is_same_batch = len(records) > 1 and bool(records[0].rows) and records[0].rows == records[1].rows
        return is_same_batch and any(outputs[0]) and outputs[0] == outputs[1]


def _list_enclosing(name: str) -> Iterator[str]:
    """Yield the names of the modules around a parameter, the innermost first."""
    while True:
        name = name.rpartition(".")[0]
        yield name
        if not name:
            return


@dataclass
class ReplicaRule:
    """A check for replicas that drift or were never equal; it reports once, as everything differs later."""

    equal: Sequence[ReplicaSet]
    unequal: Sequence[ReplicaSet]
    headers: Mapping[int, RankHeader] = field(default_factory=dict)
    _is_done: bool = False
    _num_times: dict[tuple[str, str], int] = field(default_factory=dict)

    def find(self, records: Mapping[int, StepRecord]) -> list[Finding]:
        """Return a finding for each set of ranks whose replicas began to differ in this step."""
        if self._is_done:
            return []
        found: dict[_Key, list[tuple[ReplicaSet, float]]] = {}
        for replicas in self.equal:
            distance = _measure(replicas, records)
            if distance > (_ROUNDING if replicas.tensor.eps < _NARROW else 0.0):
                gradients = _compare_gradients(replicas, records)
                key: _Key = (replicas.ranks, gradients, is_expert(replicas.name), "update")
                found.setdefault(key, []).append((replicas, distance))
        for replicas in self.unequal:
            # Gradients that are bitwise equal and nonzero were reduced over these ranks.
            gradients = _compare_gradients(replicas, records)
            if gradients == "equal" or (gradients == "differ" and self._is_unsynchronized(replicas, records)):
                number = self._num_times.get((replicas.name, gradients), 0) + 1
                self._num_times[replicas.name, gradients] = number
                if number == _TIMES:
                    key = (replicas.ranks, gradients, is_expert(replicas.name), "start")
                    found.setdefault(key, []).append((replicas, _measure(replicas, records)))
        step = next(iter(records.values())).step
        overwritten = [] if found else list(self._find_overwritten(step, records))
        self._is_done = bool(found or overwritten)
        # A norm counts wrong gradients too, so ranks whose gradients differ also clip differently.
        apart = {ranks for ranks, gradients, *_ in found if gradients == "differ"}
        found = {key: sets for key, sets in found.items() if key[1] != "clipped apart" or key[0] not in apart}
        largest = max((distance for sets in found.values() for _, distance in sets), default=0.0)
        # Small differences are consequences of the wrong tensor, through a norm over all tensors for
        # example.
        found = {key: [each for each in sets if each[1] >= _MAIN * largest] for key, sets in found.items()}
        return overwritten + [
            _make_finding(
                step, key, sets, self._explain(key, sets, records), _list_groups(sets[0][0], records)
            )
            for key, sets in found.items()
            if sets
        ]

    def _find_overwritten(self, step: int, records: Mapping[int, StepRecord]) -> Iterator[Finding]:
        """Yield a finding if one rank's values replace different ones of others, in two steps."""
        found: dict[tuple[tuple[int, ...], int], list[tuple[ReplicaSet, float]]] = {}
        for replicas in self.equal:
            members = {each.rank: each.number for each in replicas.members}
            if members.keys() <= records.keys() and _compare_gradients(replicas, records) == "differ":
                source = find_source(members, records)
                number = 0 if source is None else self._num_times.get((replicas.name, "source"), 0) + 1
                self._num_times[replicas.name, "source"] = number
                if source is not None and number >= _TIMES:
                    found.setdefault((replicas.ranks, source), []).append((replicas, 0.0))
        for (ranks, source), sets in found.items():
            cause = DriftCause(kind="overwrite", ranks=(source,))
            yield _make_finding(step, (ranks, "differ", False, "update"), sets, cause)

    def _explain(
        self, key: _Key, sets: Sequence[tuple[ReplicaSet, float]], records: Mapping[int, StepRecord]
    ) -> DriftCause | None:
        """Return the cause of the largest difference."""
        ranks, gradients, _, since = key
        if since != "update":
            return None
        worst = max(sets, key=lambda each: each[1])[0]
        whole = {each.name for each in self.equal if set(ranks) <= set(each.ranks)}
        apart = {each.name.rpartition(".")[0] for each in self.equal if each.name not in whole}
        shared = {name.rpartition(".")[0] for name in whole} - apart
        members = {member.rank: member.number for member in worst.members}
        parts = {
            each.name.rpartition(".")[0]
            for each in self.unequal
            if set(ranks) <= set(each.ranks) and each.tensor.is_varied
        }
        divided = {
            name.rpartition(".")[0] for name in whole if find_share(name, ranks, self.headers, records)
        }
        alike = (each for each in self.equal if set(ranks) <= set(each.ranks) and each.tensor.is_varied)
        same = [each for each in alike if _compare_gradients(each, records) in ("equal", "clipped apart")]
        right = {each.name.rpartition(".")[0] for each in same}
        return find_cause(
            worst.name,
            members,
            records,
            gradients,
            shared - divided,
            right=right & shared,
            parts=parts,
            share=find_share(worst.name, ranks, self.headers, records),
            summed=self._find_summed(records),
        )

    def _find_summed(self, records: Mapping[int, StepRecord]) -> list[tuple[int, ...]]:
        """Return the groups of ranks that add up activations of their batches, without data-parallel wrappers.

        Ranks that gather the tokens of all their batches for experts have more positions.
        """
        own = [(self.headers[rank], record) for rank, record in records.items() if rank in self.headers]
        sums = [(header, line) for header, record in own for line in record.sums]
        return [
            line.ranks
            for header, line in sums
            if line.num_positions == header.num_positions and not set(line.ranks) <= set(header.data_ranks)
        ]

    def has_unequal_replicas(self, records: Mapping[int, StepRecord]) -> bool:
        """Return whether tensors with different values are replicas, so that no norm is right.

        Their gradients are equal, or the ranks exchange no activations and so hold no parts of one model.
        """
        return any(
            _compare_gradients(replicas, records) == "equal" or not _may_be_parts(replicas, records)
            for replicas in self.unequal
        )

    def _is_unsynchronized(self, replicas: ReplicaSet, records: Mapping[int, StepRecord]) -> bool:
        """Return whether data-parallel ranks that exchange no activations hold different values.

        Ranks are data-parallel by a wrapper, or if most of the other gradients are equal bit for bit although
        the rows are not.
        """
        if _may_be_parts(replicas, records) or is_expert(replicas.name):
            return False  # experts may be exchanged by other libraries
        first = self.headers.get(replicas.ranks[0])
        if first is not None and set(replicas.ranks) <= set(first.data_ranks):
            return True
        rows = [records[rank].rows for rank in replicas.ranks if rank in records]
        if not all(rows) or len(set(rows)) < len(rows):
            return False
        beside = [each for each in self.equal if set(replicas.ranks) <= set(each.ranks)]
        reduced = [each for each in beside if _compare_gradients(each, records) == "equal"]
        return bool(reduced) and 2 * len(reduced) >= len(beside)


def _may_be_parts(replicas: ReplicaSet, records: Mapping[int, StepRecord]) -> bool:
    return bool(replicas.tensor.mesh) or exchange_activations(replicas.ranks, records)


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


def _compare_gradients(replicas: ReplicaSet, records: Mapping[int, StepRecord]) -> _Gradients:
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


def _list_groups(replicas: ReplicaSet, records: Mapping[int, StepRecord]) -> tuple[tuple[int, ...], ...]:
    """Return the sets of ranks with equal gradients, or none if all gradients are equal or all differ."""
    found: dict[int, list[int]] = {}
    for member in replicas.members:
        gradients = records[member.rank].gradients if member.rank in records else ()
        if member.number < len(gradients):
            found.setdefault(gradients[member.number], []).append(member.rank)
    is_divided = 1 < len(found) < sum(map(len, found.values()))
    return tuple(map(tuple, found.values())) if is_divided else ()


def is_expert(name: str) -> bool:
    """Return whether a parameter belongs to one of several experts, judged by its FQN."""
    return any("expert" in part and "shared" not in part for part in name.split("."))


def _make_finding(
    step: int,
    key: _Key,
    sets: Sequence[tuple[ReplicaSet, float]],
    cause: DriftCause | None,
    groups: tuple[tuple[int, ...], ...] = (),
) -> Finding:
    ranks, gradients, are_experts, since = key
    distance = max(each for _, each in sets)
    facts = DriftFacts(
        names=tuple(replicas.name for replicas, _ in sets),
        since=since,
        gradients=gradients,
        distance=distance,
        are_experts=are_experts,
        groups=groups,
        cause=cause,
    )
    return make_finding(GuardCheck.REPLICAS, sets[0][0].name, step, ranks, facts, error=distance)
