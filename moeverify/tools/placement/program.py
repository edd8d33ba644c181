"""The mixed-integer program of one layer, for HiGHS through SciPy.

An expert takes one option: k replicas on one node, or k on every node. With one node this covers every
placement; with several nodes it covers placements that are hierarchical in this sense.

Variables:
- y[o]: the expert of option o takes it;
- z[o, r]: one replica of option o is on rank r;
- g[o, r]: the load of that replica, where it does not follow from o and r;
- t: the largest load of a rank.

Loads are in units of the mean load, which keeps HiGHS's tolerances small in comparison.

With even sources the load of a replica follows from its option. Otherwise a replica keeps the copies of its
own rank, and the rest is divided evenly. Let A be the ranks of the replicas on a node. Replica r then has
the load src[r] + (total - sum over A of src) / k, where the sum is linear in z. This is a lower bound on g
where z[o, r] = 1.

Notation: E experts, R ranks, N nodes, G ranks per node, S slots per rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from moeverify.tools.placement.cluster import Cluster
from moeverify.tools.placement.marks import BoolArray
from moeverify.tools.placement.sharing import FloatArray

if TYPE_CHECKING:
    from scipy.sparse import csr_array


class Option(NamedTuple):
    """One way to replicate an expert: `replicas` on each of `nodes`."""

    expert: int
    nodes: range
    replicas: int


class Solution(NamedTuple):
    """Result of HiGHS: values of all variables or None, a lower bound, and whether the values are optimal."""

    values: FloatArray | None
    bound: float
    is_optimal: bool


class Limit(NamedTuple):
    """A row that keeps an objective at `most` or below."""

    coefficients: FloatArray
    most: float


@dataclass
class _Constraints:
    """Rows of a sparse matrix under construction: low <= sum of coefficients * variables <= high."""

    row: list[int] = field(default_factory=list)
    column: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def add(self, terms: Sequence[tuple[int, float]], low: float, high: float) -> None:
        number = len(self.low)
        for column, value in terms:
            self.row.append(number)
            self.column.append(column)
            self.value.append(value)
        self.low.append(low)
        self.high.append(high)


class LayerProgram:
    """The program of one layer; only placements with loads up to `largest` are considered.

    `largest` must be the largest load of a known placement. Shapes: copies (E, R) by source rank.
    """

    def __init__(
        self, copies: FloatArray, cluster: Cluster, num_slots: int, largest: float, *, is_even: bool
    ) -> None:
        self._cluster = cluster
        self._is_even = is_even
        self._unit = max(float(copies.sum()) / cluster.num_ranks, 1e-300)
        self._copies = copies / self._unit
        self._num_slots = num_slots
        self._options = list(self._list_options(largest / self._unit))

    @property
    def num_binaries(self) -> int:
        """Return the number of binary variables; available before `build`."""
        size = self._cluster.ranks_per_node
        return sum(1 + len(option.nodes) * size for option in self._options)

    def _list_options(self, largest: float) -> Iterator[Option]:
        """Yield the options that may occur in a placement whose loads are `largest` or below.

        With k replicas of an expert, one has at least 1/k of its copies, which gives the minimum k. The
        slots left by the minimum of all other experts give the maximum.
        """
        cluster = self._cluster
        size, num_nodes = cluster.ranks_per_node, cluster.num_nodes
        total = self._copies.sum(1)
        fewest = np.maximum(np.ceil(total / largest * (1 - 1e-6)), 1).astype(int) if largest > 0 else None
        if fewest is None:
            fewest = np.ones(len(total), dtype=int)
        free = cluster.num_ranks * self._num_slots - fewest.sum()
        places = [range(node, node + 1) for node in range(num_nodes)]
        if num_nodes > 1:
            places.append(range(num_nodes))
        for expert, least in enumerate(fewest):
            for nodes in places:
                for replicas in range(1, size + 1):
                    if least <= replicas * len(nodes) <= least + free:
                        yield Option(expert, nodes, replicas)

    def build(self) -> None:
        """Create the variables and the rows."""
        size = self._cluster.ranks_per_node
        first = len(self._options)
        self._z: list[dict[int, int]] = []  # of each option: rank -> variable
        for option in self._options:
            ranks = [rank for node in option.nodes for rank in range(node * size, (node + 1) * size)]
            self._z.append({rank: first + position for position, rank in enumerate(ranks)})
            first += len(ranks)
        self._num_binaries = first
        self._rows = _Constraints()
        self._loads: list[list[tuple[int, float]]] = [[] for _ in range(self._cluster.num_ranks)]
        self._num_variables = first
        for position in range(len(self._options)):
            self._add_option(position)
        self._t = self._num_variables
        self._num_variables += 1
        self._add_totals()

    def _add_option(self, position: int) -> None:
        """Add the rows that couple the replicas of one option to it, and their loads to the ranks."""
        option, ranks = self._options[position], self._z[position]
        size = self._cluster.ranks_per_node
        for node in option.nodes:
            here = range(node * size, (node + 1) * size)
            # The option fixes the number of replicas. A row per replica tightens the relaxation.
            self._rows.add([(position, -option.replicas), *((ranks[rank], 1) for rank in here)], 0, 0)
            for rank in here:
                self._rows.add([(ranks[rank], 1), (position, -1)], -np.inf, 0)
            self._add_loads(position, here)

    def _add_loads(self, position: int, here: range) -> None:
        """Add the contribution of one option's replicas on one node to the loads of its ranks."""
        option, ranks = self._options[position], self._z[position]
        sent = self._copies[option.expert]
        total = sent[here].sum() if len(option.nodes) > 1 else sent.sum()
        number = option.replicas
        if self._is_even or number == 1 or number == len(here):
            for rank in here:
                own = 0.0 if self._is_even or number == 1 else sent[rank] - sent[here].sum() / number
                self._loads[rank].append((ranks[rank], own + total / number))
            return
        for rank in here:
            g = self._num_variables
            self._num_variables += 1
            self._loads[rank].append((g, 1.0))
            others = np.sort(np.delete(sent[here], rank - here.start))[::-1][: number - 1].sum()
            least = sent[rank] + (total - sent[rank] - others) / number
            self._rows.add([(g, 1), (ranks[rank], -least)], 0, np.inf)
            # g >= src z + (total y - sum of src z) / k - M (1 - z), with M the largest value of the
            # fraction.
            most = total / number
            terms = {g: 1.0, position: -most}
            for other in here:
                terms[ranks[other]] = sent[other] / number
            terms[ranks[rank]] -= sent[rank] + most
            self._rows.add(list(terms.items()), -most, np.inf)

    def _add_totals(self) -> None:
        """Add one option per expert, and slots and load per rank."""
        by_expert: dict[int, list[int]] = {}
        by_rank: list[list[tuple[int, float]]] = [[] for _ in range(self._cluster.num_ranks)]
        for position, option in enumerate(self._options):
            by_expert.setdefault(option.expert, []).append(position)
            for rank, variable in self._z[position].items():
                by_rank[rank].append((variable, 1))
        for positions in by_expert.values():
            self._rows.add([(position, 1) for position in positions], 1, 1)
        for rank, terms in enumerate(by_rank):
            self._rows.add(terms, 1, self._num_slots)
            self._rows.add([*self._loads[rank], (self._t, -1)], -np.inf, 0)

    def minimize(
        self, objective: FloatArray, limits: Sequence[Limit], seconds: float, *, is_ordered: bool
    ) -> Solution:
        """Return the best solution that HiGHS finds in `seconds`, among placements within all limits.

        `is_ordered` requires the ranks of a node in order of their loads. It removes placements that differ
        only in the names of ranks, and is valid if the objective does not distinguish them.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp

        integrality = np.zeros(self._num_variables)
        integrality[: self._num_binaries] = 1
        highest = np.where(integrality > 0, 1.0, np.inf)
        low, high = np.array(self._rows.low), np.array(self._rows.high)
        constraints = [LinearConstraint(self._matrix(self._rows), low, high)]
        if is_ordered:
            ordered = self._order_ranks()
            constraints.append(LinearConstraint(self._matrix(ordered), ordered.low, ordered.high))
        constraints += [LinearConstraint(each.coefficients[None], -np.inf, each.most) for each in limits]
        result = milp(
            objective,
            integrality=integrality,
            bounds=Bounds(0, highest),
            constraints=constraints,
            options={"time_limit": max(seconds, 0.01), "mip_rel_gap": 1e-6},
        )
        bound = getattr(result, "mip_dual_bound", None)
        is_known = bound is not None and bool(np.isfinite(bound))
        return Solution(result.x, float(bound or 0.0) if is_known else 0.0, result.status == 0)

    def _matrix(self, rows: _Constraints) -> csr_array:
        from scipy.sparse import coo_array

        shape = (len(rows.low), self._num_variables)
        return coo_array((rows.value, (rows.row, rows.column)), shape=shape).tocsr()

    def _order_ranks(self) -> _Constraints:
        rows = _Constraints()
        for rank in range(self._cluster.num_ranks - 1):
            if self._cluster.node_of(rank) == self._cluster.node_of(rank + 1):
                below = [(column, -value) for column, value in self._loads[rank + 1]]
                rows.add([*self._loads[rank], *below], 0, np.inf)
        return rows

    def largest_load(self) -> FloatArray:
        """Return the objective t."""
        objective = np.zeros(self._num_variables)
        objective[self._t] = 1.0
        return objective

    def off_rank(self) -> FloatArray:
        """Return the objective of copies that leave their rank, minus the constant number of all copies."""
        objective = np.zeros(self._num_variables)
        for option, ranks in zip(self._options, self._z, strict=True):
            for rank, variable in ranks.items():
                objective[variable] = -self._copies[option.expert, rank]
        return objective

    def off_node(self) -> FloatArray:
        """Return the objective of copies that leave their node."""
        size = self._cluster.ranks_per_node
        objective = np.zeros(self._num_variables)
        for position, option in enumerate(self._options):
            here = slice(option.nodes.start * size, option.nodes.stop * size)
            sent = self._copies[option.expert]
            objective[position] = sent.sum() - sent[here].sum()
        return objective

    def arrivals(self, current: BoolArray) -> FloatArray:
        """Return the objective of experts on ranks that do not hold them in `current` (E, R)."""
        objective = np.zeros(self._num_variables)
        for option, ranks in zip(self._options, self._z, strict=True):
            for rank, variable in ranks.items():
                objective[variable] = float(not current[option.expert, rank])
        return objective

    def to_units(self, load: float) -> float:
        """Return a load in units of the mean."""
        return load / self._unit

    def to_copies(self, load: float) -> float:
        """Return a load in token copies."""
        return load * self._unit

    def read_marks(self, values: FloatArray) -> BoolArray:
        """Return the placement (E, R) encoded by the values of the variables."""
        marks = np.zeros(self._copies.shape, dtype=np.bool_)
        for option, ranks in zip(self._options, self._z, strict=True):
            for rank, variable in ranks.items():
                marks[option.expert, rank] |= values[variable] > 0.5
        return marks
