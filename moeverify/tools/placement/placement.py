"""A placement: for each MoE layer, the experts in the slots of each rank.

Notation: L MoE layers, E experts, R ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from moeverify.errors import CaseError, Problem

Matrix = tuple[tuple[int, ...], ...]
"""The experts in the slots of each rank. `((0, 3), (1, 2))` puts experts 0 and 3 on rank 0."""

MOST_EXPERTS = 1 << 20
"""Far above every model. Loops over the experts of a file must end."""

_MOST_LISTED = 8  # experts or ranks that a message lists individually


@dataclass(frozen=True)
class Placement:
    """A placement of experts on ranks for each MoE layer, with any number of replicas and slots.

    `layers` holds the index of each MoE layer among the model's blocks, `matrices` its matrix. Without
    `layers` there is one matrix, which applies to every MoE layer.

    Example: `Placement(4, (((0, 3), (1, 2), (1, 2), (0, 3)),))` has 4 experts on 4 ranks, each on two of
    them.

    Raises: CaseError with all problems.
    """

    num_experts: int
    matrices: tuple[Matrix, ...]
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        problems = list(_check_layers(self.layers, len(self.matrices)))
        if not 0 < self.num_experts <= MOST_EXPERTS:
            message = f"expected 1 to {MOST_EXPERTS} experts, got {self.num_experts}"
            raise CaseError([*problems, Problem(message, path="num_experts")])
        for name, matrix in self._name_matrices():
            problems += check_matrix(matrix, self.num_experts, path=name)
        sizes = {len(matrix) for matrix in self.matrices}
        if len(sizes) > 1:
            counts = ", ".join(map(str, sorted(sizes)))
            problems.append(
                Problem(
                    f"the layers have different numbers of ranks: {counts}", remedy="give each a row a rank"
                )
            )
        if problems:
            raise CaseError(problems)

    def _name_matrices(self) -> Iterator[tuple[str, Matrix]]:
        if not self.layers:
            yield from (("matrix", matrix) for matrix in self.matrices)
        else:
            yield from ((f"layers.{layer}", m) for layer, m in zip(self.layers, self.matrices, strict=False))

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks."""
        return len(self.matrices[0])

    @property
    def num_slots(self) -> int:
        """Return the largest number of experts of a rank in any layer."""
        return max(len(row) for matrix in self.matrices for row in matrix)

    def spell_out(self, layers: Sequence[int]) -> Placement:
        """Return the same placement with one matrix for each of `layers`.

        Raises: CaseError when the placement has other layers.
        """
        if self.layers and self.layers != tuple(layers):
            raise CaseError(
                [
                    Problem(
                        f"the placement has MoE layers {_list(self.layers)}, expected {_list(layers)}",
                        path="layers",
                        remedy="use a placement of this model",
                    )
                ]
            )
        matrices = self.matrices if self.layers else self.matrices * len(layers)
        return Placement(self.num_experts, matrices, tuple(layers))


def place_in_blocks(num_experts: int, num_ranks: int, layers: Sequence[int]) -> Placement:
    """Return the placement of plain expert parallelism: equal consecutive blocks, in rank order.

    With more ranks than experts, consecutive ranks hold the same expert.
    """
    rows: list[tuple[int, ...]] = []
    if num_ranks <= num_experts:
        # The first `num_experts % num_ranks` ranks take one more, so that no rank is empty.
        size, longer = divmod(num_experts, num_ranks)
        for rank in range(num_ranks):
            start = rank * size + min(rank, longer)
            rows.append(tuple(range(start, start + size + (rank < longer))))
    else:
        rows = [(rank * num_experts // num_ranks,) for rank in range(num_ranks)]
    return Placement(num_experts, (tuple(rows),) * len(layers), tuple(layers))


def check_matrix(matrix: Sequence[Sequence[int]], num_experts: int, *, path: str) -> Iterator[Problem]:
    """Yield the problems of one matrix; `path` is its name in messages."""
    if not matrix:
        yield Problem("there is no rank", path=path, remedy="write a row for each rank: [[0, 3], [1, 2]]")
        return
    found: set[int] = set()
    for rank, row in enumerate(matrix):
        where = f"{path}[{rank}]"
        if not row:
            yield Problem(f"rank {rank} holds no expert", path=where, remedy="give it at least one expert")
        unknown = sorted({expert for expert in row if not 0 <= expert < num_experts})
        if unknown:
            yield Problem(
                f"{_name_experts(unknown)} is not one of the {num_experts} experts"
                if len(unknown) == 1
                else f"{_name_experts(unknown)} are not among the {num_experts} experts",
                path=where,
                remedy=f"experts are numbered 0 to {num_experts - 1}",
            )
        twice = sorted(expert for expert, number in Counter(row).items() if number > 1)
        if twice:
            yield Problem(
                f"rank {rank} holds {_name_experts(twice)} more than once",
                path=where,
                remedy="name each expert once in a row; replicas are on different ranks",
            )
        found.update(row)
    missing = sorted(set(range(num_experts)) - found)
    if missing:
        yield Problem(
            f"no rank holds {_name_experts(missing)}",
            path=path,
            remedy="put each expert on at least one rank",
        )


def check_fit(
    placement: Placement, *, num_experts: int, num_ranks: int, layers: Sequence[int], file: str = ""
) -> Iterator[Problem]:
    """Yield the differences between a placement and the requirements of a model and its ranks."""
    if placement.num_experts != num_experts:
        message = f"the placement has {placement.num_experts} experts, the model has {num_experts}"
        yield Problem(message, file, path="num_experts", remedy="use a placement of this model")
    if placement.num_ranks != num_ranks:
        message = f"the placement has {placement.num_ranks} ranks, expected {num_ranks}"
        yield Problem(
            message, file, remedy=f"write {num_ranks} rows, or place for {placement.num_ranks} ranks"
        )
    if placement.layers and placement.layers != tuple(layers):
        message = f"the placement has MoE layers {_list(placement.layers)}, the model has {_list(layers)}"
        yield Problem(message, file, path="layers", remedy="use a placement of this model")


def _check_layers(layers: Sequence[int], num_matrices: int) -> Iterator[Problem]:
    if not num_matrices:
        yield Problem("there is no layer", path="layers", remedy="give a matrix, or one for each MoE layer")
    if layers and len(layers) != num_matrices:
        yield Problem(f"there are {len(layers)} layers and {num_matrices} matrices", path="layers")
    if not layers and num_matrices > 1:
        yield Problem(
            f"there are {num_matrices} matrices, and nothing says of which layers",
            path="layers",
            remedy="name the MoE layers, or give one matrix for all",
        )
    if len(set(layers)) < len(layers) or any(layer < 0 for layer in layers):
        yield Problem(f"MoE layers {_list(layers)}: expected different indices from 0", path="layers")


def _name_experts(experts: Sequence[int]) -> str:
    return f"{'expert' if len(experts) == 1 else 'experts'} {_list(experts)}"


def _list(numbers: Sequence[int]) -> str:
    """Return numbers for a message; of many numbers, the first ones."""
    shown = ", ".join(map(str, numbers[:_MOST_LISTED]))
    more = len(numbers) - _MOST_LISTED
    return f"{shown} and {more} more" if more > 0 else shown


def place_striped(num_experts: int, num_ranks: int, layers: Sequence[int]) -> Placement:
    """Return the placement of expert e on rank e mod R.

    With more ranks than experts, rank r holds expert r mod E.
    """
    count = max(num_experts, num_ranks)
    matrix = tuple(
        tuple(index % num_experts for index in range(rank, count, num_ranks)) for rank in range(num_ranks)
    )
    return Placement(num_experts, (matrix,) * len(layers), tuple(layers))


def place_everywhere(num_experts: int, num_ranks: int, layers: Sequence[int]) -> Placement:
    """Return the placement of every expert on every rank, so that no token leaves its rank."""
    matrix = (tuple(range(num_experts)),) * num_ranks
    return Placement(num_experts, (matrix,) * len(layers), tuple(layers))


STRATEGIES: Mapping[str, Callable[[int, int, Sequence[int]], Placement]] = {
    "blocks": place_in_blocks,
    "striped": place_striped,
    "everywhere": place_everywhere,
}
"""By the name in `layout.placement`: functions of (num_experts, num_ranks, indices of MoE layers)."""
