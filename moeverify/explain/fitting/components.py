"""Parts of the golden's gradient: by loss term, and by the share of each rank and micro-batch.

A wrong aggregation is a wrong linear combination of these parts, so a fit on them identifies the error.

A cell is the data of one loss rank in one micro-batch: some rows and some positions.

Losses are sums over tokens divided by global counts (`moeverify.train.objective`). A gradient is therefore
the sum over cells and terms of the gradient of the cell's tokens, with fixed global counts. If a rank
weights its tokens differently, or omits a term, only the coefficients of these parts change.

The balance loss multiplies expert counts (without gradient) by sums of probabilities; its cells differ in
these sums only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeverify.cases.axes.split import split_rows
from moeverify.cases.schema import Case
from moeverify.parallel.context_parallel import split_positions
from moeverify.results.part import Tokens
from moeverify.train.assemble import assemble_single
from moeverify.train.data import Share, make_batch, whole_share
from moeverify.train.program import TrainingProgram
from moeverify.train.subject import Vector
from moeverify.verification.golden.store import StoredGolden


@dataclass(frozen=True)
class Cell:
    """Data of one loss rank in one micro-batch: rows and positions of the global batch."""

    tokens: Tokens
    rows: tuple[int, ...]
    positions: tuple[int, ...]


@dataclass(frozen=True)
class Components:
    """Parts of the golden's gradient at one step.

    `parts[term][cell][parameter]` add up to the golden over terms and cells. Terms are lm, balance and z,
    or have the names of a user's loss. `num_valid` has the number of valid tokens of each cell.
    """

    cells: tuple[Cell, ...]
    parts: dict[str, list[Vector]]
    num_valid: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def terms(self) -> tuple[str, ...]:
        """Return the names of the loss terms."""
        return tuple(self.parts)

    def term(self, term: str, name: str) -> Tensor:
        """Return a loss term's part of a parameter's gradient."""
        return torch.stack([vector[name] for vector in self.parts[term]]).sum(dim=0)

    def share(self, number: int, name: str) -> Tensor:
        """Return a cell's part of a parameter's gradient, over all terms."""
        return torch.stack([self.parts[term][number][name] for term in self.terms]).sum(dim=0)


def find_cells(case: Case) -> tuple[Cell, ...]:
    """Return the cells of a layout, ordered by loss rank and micro-batch."""
    layout, data = case.layout, case.recipe.data
    cells: list[Cell] = []
    for data_rank in range(layout.data_ranks):
        rows = split_rows(data.batch, layout.data_ranks, data_rank)
        for cp_rank in range(layout.cp):
            positions = split_positions(data.seq_len, layout.cp, cp_rank, layout.context_parallel)
            for micro, part in enumerate(Share(rows, positions).micro_batches(layout.micro_batches)):
                # Omit an index that has only one value.
                tokens = Tokens(
                    data_rank=data_rank if layout.data_ranks > 1 else None,
                    context_rank=cp_rank if layout.cp > 1 else None,
                    micro_batch=micro if layout.micro_batches > 1 else None,
                )
                cells.append(Cell(tokens, tuple(part.rows), tuple(positions)))
    return tuple(cells)


def find_components(case: Case, golden: StoredGolden, step: int, device: torch.device) -> Components | None:
    """Return the parts of the golden's gradient, or None if only the user's step knows how to compute a loss."""
    try:
        return make_components(case, golden, step, device)
    except Exception:  # of the user's model, which is called as a recipe without a step calls it
        if case.recipe.step is None:
            raise
        return None


def make_components(case: Case, golden: StoredGolden, step: int, device: torch.device) -> Components:
    """Return the parts of the golden's gradient at a step, computed on this device in float64."""
    recipe = case.recipe
    program = assemble_single(recipe, device, compute="float64")
    if step > 0:
        load_weights(program, golden, step - 1)
    batch = make_batch(
        recipe.data, recipe.model.vocab_size, recipe.seed, step, whole_share(recipe.data), device
    )
    gradient = program.subject.split_gradient(program, batch)
    cells = find_cells(case)
    masks = [_mask(batch.valid, cell) for cell in cells]
    parts = [gradient.gradients(mask) for mask in masks]
    return Components(
        cells=cells,
        parts=_sort_by_term(parts),
        num_valid=tuple(int(mask.sum()) for mask in masks),
        names=tuple(held.name for held in program.shards),
    )


def _sort_by_term(parts: Sequence[Mapping[str, Vector]]) -> dict[str, list[Vector]]:
    """Return the parts of all cells by term. Cells without valid tokens may lack terms, and get zeros."""
    known = {term: vector for part in parts for term, vector in part.items()}
    some = next(iter(known.values()))
    zero = {name: torch.zeros_like(value) for name, value in some.items()}
    return {term: [part.get(term, zero) for part in parts] for term in known}


@torch.no_grad()
def load_weights(program: TrainingProgram, golden: StoredGolden, step: int) -> None:
    """Overwrite the weights and buffers of a program with the golden's after a step."""
    for kind, holdings in (("weight", program.shards), ("buffer", program.buffers)):
        for held in holdings:
            values = golden.read(step, kind, held.name, held.region)
            if values is not None:
                held.local().copy_(values)


def _mask(valid: Tensor, cell: Cell) -> Tensor:
    inside = torch.zeros_like(valid)
    rows = torch.tensor(cell.rows, device=valid.device)
    positions = torch.tensor(cell.positions, device=valid.device)
    inside[rows[:, None], positions[None, :]] = True
    return valid & inside


ComponentSource = Callable[[], Components | None]
