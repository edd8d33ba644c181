"""The golden's gradient, taken apart: by loss term, by the share of each rank and micro-batch, and of padding.

Every wrong aggregation is a wrong linear combination of these parts, so a fit on them reads off what was done.
A cell is what one rank of the loss sees in one micro-batch: some rows, some positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moeverify.axes.split import split_rows
from moeverify.case.schema import Case, MoE, ReferenceModel
from moeverify.golden.store import StoredGolden
from moeverify.model.router import RouterStats
from moeverify.parallel.context_parallel import split_positions
from moeverify.train.assemble import assemble_single
from moeverify.train.data import Batch, Share, make_batch, whole_share
from moeverify.train.forward import cross_entropy
from moeverify.train.objective import Normalizers, Sums, router_losses
from moeverify.train.program import Program

Vector = dict[str, Tensor]  # parameter name -> gradient, float64, on the CPU as all that is compared with it
TERMS = ("lm", "balance", "z")


@dataclass(frozen=True)
class Cell:
    """What the loss rank `loss_rank`, whose place is `label`, sees in one micro-batch."""

    loss_rank: int
    micro_batch: int
    label: str
    rows: tuple[int, ...]
    positions: tuple[int, ...]


@dataclass(frozen=True)
class Components:
    """The parts of the golden's gradient at one step.

    `parts[term][cell]` are their sum: the golden. `padding[term]` is what padding tokens would add to lm and
    z; for balance it is the whole term with padding counted. `num_valid` counts each cell's valid tokens.
    """

    cells: tuple[Cell, ...]
    parts: dict[str, list[Vector]]
    padding: dict[str, Vector]
    num_valid: tuple[int, ...]
    names: tuple[str, ...]

    def term(self, term: str, name: str) -> Tensor:
        """Return a loss term's part of a parameter's gradient."""
        return torch.stack([vector[name] for vector in self.parts[term]]).sum(dim=0)

    def cell(self, number: int, name: str) -> Tensor:
        """Return a cell's part of a parameter's gradient, over all terms."""
        return torch.stack([self.parts[term][number][name] for term in TERMS]).sum(dim=0)


def find_cells(case: Case) -> tuple[Cell, ...]:
    """Return the cells of a layout, by loss rank and then micro-batch."""
    layout, data = case.layout, case.recipe.data
    cells: list[Cell] = []
    for data_rank in range(layout.data_ranks):
        rows = split_rows(data.batch, layout.data_ranks, data_rank)
        for cp_rank in range(layout.cp):
            positions = split_positions(data.seq_len, layout.cp, cp_rank, layout.context_parallel)
            for micro, part in enumerate(Share(rows, positions).micro_batches(layout.micro_batches)):
                place = [f"dp {data_rank}"] if layout.data_ranks > 1 else []
                place += [f"cp {cp_rank}"] if layout.cp > 1 else []
                place += [f"micro-batch {micro}"] if layout.micro_batches > 1 else []
                loss_rank = data_rank * layout.cp + cp_rank
                label = ", ".join(place) or "the whole batch"
                cells.append(Cell(loss_rank, micro, label, tuple(part.rows), tuple(positions)))
    return tuple(cells)


def make_components(case: Case, golden: StoredGolden, step: int, device: torch.device) -> Components:
    """Return the parts of the golden's gradient at a step, computed on this one device in float64."""
    recipe = case.recipe
    assert isinstance(recipe.model, ReferenceModel)
    program = assemble_single(recipe, device, compute="float64")
    if step > 0:
        load_weights(program, golden, step - 1)
    batch = make_batch(
        recipe.data, recipe.model.vocab_size, recipe.seed, step, whole_share(recipe.data), device
    )
    full = recipe.data.model_copy(update={"min_valid": 1.0})
    unmasked = make_batch(full, recipe.model.vocab_size, recipe.seed, step, whole_share(full), device)
    model = _TermGradients(program, recipe.model.moe, batch, unmasked.targets, recipe.data.batch)
    cells = find_cells(case)
    masks = [_mask(batch.valid, cell) for cell in cells]
    parts = [model.gradients(mask) for mask in masks]
    padding = model.gradients(~batch.valid) if not bool(batch.valid.all()) else {}
    if padding and recipe.model.moe is not None:
        padding["balance"] = model.balance_with_padding()
    return Components(
        cells=cells,
        parts={term: [part[term] for part in parts] for term in TERMS},
        padding=padding,
        num_valid=tuple(int(mask.sum()) for mask in masks),
        names=tuple(held.name for held in program.holdings),
    )


@torch.no_grad()
def load_weights(program: Program, golden: StoredGolden, step: int) -> None:
    """Overwrite the weights and buffers of a program with the golden's after a step."""
    for kind, holdings in (("weight", program.holdings), ("buffer", program.buffers)):
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


class _TermGradients:
    """Gradients of each loss term restricted to some tokens, normalized as the golden's are."""

    def __init__(
        self, program: Program, moe: MoE | None, batch: Batch, targets: Tensor, num_rows: int
    ) -> None:
        self.program = program
        self.moe = moe
        self.batch = batch
        self.targets = targets
        self.normalizers = Normalizers(batch.valid.sum(), num_rows)
        with torch.no_grad():
            self.counts = [stats.counts for stats in self._forward(batch.valid).routers]

    def gradients(self, mask: Tensor) -> dict[str, Vector]:
        """Return the gradient of each term's sum over the tokens of a mask (B, S)."""
        output = self._forward(mask)
        loss = cross_entropy(output.logits, self.targets.masked_fill(~mask, -100))
        found = {"lm": self._backward(loss.sum() / self.normalizers.num_valid)}
        zero = {name: torch.zeros_like(value) for name, value in found["lm"].items()}
        if self.moe is None:
            return found | {"balance": zero, "z": zero}
        stats = [
            RouterStats(part.probability_sum, counts, part.z_sum)
            for part, counts in zip(output.routers, self.counts, strict=True)
        ]
        balance, z = router_losses(self.moe, stats, self.batch, self.normalizers, Sums())
        return found | {"balance": self._backward(balance), "z": self._backward(z)}

    def balance_with_padding(self) -> Vector:
        """Return the gradient of the balance loss as it would be if padding counted."""
        assert self.moe is not None
        everything = torch.ones_like(self.batch.valid)
        output = self._forward(everything)
        length = torch.full_like(self.batch.row_valid, everything.shape[1])
        padded = Batch(
            self.batch.share, self.batch.tokens, self.targets, self.batch.positions, everything, length
        )
        normalizers = Normalizers(everything.sum(), self.normalizers.num_rows)
        balance, _ = router_losses(self.moe, output.routers, padded, normalizers, Sums())
        return self._backward(balance)

    def _forward(self, mask: Tensor):  # type: ignore[no-untyped-def]
        return self.program.model(self.batch.tokens, self.batch.positions, mask)

    def _backward(self, loss: Tensor) -> Vector:
        parameters = [held.tensor for held in self.program.holdings]
        if not loss.requires_grad:
            return {held.name: _bring(torch.zeros_like(held.tensor)) for held in self.program.holdings}
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        return {
            held.name: _bring(torch.zeros_like(held.tensor) if gradient is None else gradient)
            for held, gradient in zip(self.program.holdings, gradients, strict=True)
        }


def _bring(tensor: Tensor) -> Tensor:
    """Return a tensor where the pieces of the ranks are: a fit takes both together."""
    return tensor.detach().to("cpu", torch.float64)


ComponentSource = Callable[[], Components]
