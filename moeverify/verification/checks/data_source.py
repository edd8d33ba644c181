"""Source of tokens, labels, positions or masks that a rank read instead of its own.

Tokens are hashes of seed, step, row and position. The source of a reading is found by comparison with the
data of other micro-batches, ranks and steps. Shapes: B rows and S positions of the global batch; M rows and
s positions of one micro-batch on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeverify.cases.axes.mesh import MeshPlan
from moeverify.cases.axes.registry import DEGREES
from moeverify.cases.axes.split import split_rows
from moeverify.cases.schema import Case
from moeverify.parallel.context_parallel import split_positions
from moeverify.results.data import BatchField, ReadSource, SourceKind
from moeverify.train.data import IGNORED, Share, make_batch, whole_share

MOST_STEPS = 16  # nearest steps that are searched
MOST_ROWS = 4  # rows that a source lists
CHANCE = 0.01  # largest probability of a chance match at which a share is named as the source of masks
MASKS = (BatchField.MASK, BatchField.LOSS_MASK)


@dataclass(frozen=True)
class GlobalBatch:
    """The batch of one step: `text` (B, S + 1), whose last token is only a label, and valid `lengths` (B)."""

    text: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class BatchSlice:
    """Rows (M) and positions (s) of one micro-batch on one rank, both int64."""

    rows: Tensor
    positions: Tensor


class ExpectedData:
    """Data that every rank of a case has to read, derived from the case and not from the tested program."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.plan = MeshPlan.of(case.layout)
        self._batches: dict[int, GlobalBatch] = {}

    def batch(self, step: int) -> GlobalBatch:
        """Return the global batch of a step."""
        if step not in self._batches:
            recipe, cpu = self.case.recipe, torch.device("cpu")
            whole, size = whole_share(recipe.data), recipe.model.vocab_size
            made = make_batch(recipe.data, size, recipe.seed, step, whole, cpu)
            # Without padding the last label is known too. The text does not depend on the lengths.
            full = recipe.data.model_copy(update={"min_valid": 1.0})
            labels = make_batch(full, size, recipe.seed, step, whole, cpu).targets
            self._batches[step] = GlobalBatch(torch.cat([made.tokens, labels[:, -1:]], dim=1), made.row_valid)
        return self._batches[step]

    def cut(self, rank: int, micro_batch: int) -> BatchSlice:
        """Return the rows and positions of a rank in a micro-batch."""
        layout, data = self.case.layout, self.case.recipe.data
        place, share = self.plan.data.coordinates(rank), 0
        for axis in DEGREES:
            if axis.batch_dim == "rows":
                share = share * self.plan.data.axes[axis.name] + place[axis.name]
        rows = split_rows(data.batch, layout.data_ranks, share)
        size = len(rows) // layout.micro_batches
        positions = split_positions(data.seq_len, layout.cp, place["cp"], layout.context_parallel)
        own = rows[micro_batch * size : (micro_batch + 1) * size]
        return BatchSlice(torch.tensor(tuple(own)), torch.tensor(tuple(positions)))

    def values(self, field: BatchField, step: int, cut: BatchSlice) -> Tensor:
        """Return the data at the given rows and positions, (M, s). Labels of padding are included."""
        batch = self.batch(step)
        if field is BatchField.POSITIONS:
            return cut.positions.expand(len(cut.rows), -1)
        if field in MASKS:
            return cut.positions < batch.lengths[cut.rows, None]
        return batch.text[cut.rows[:, None], cut.positions + (field is BatchField.LABELS)]

    def labels(self, step: int, cut: BatchSlice) -> Tensor:
        """Return the labels (M, s), with padding set to `IGNORED`."""
        counts = self.values(BatchField.LOSS_MASK, step, cut)
        return self.values(BatchField.LABELS, step, cut).masked_fill(~counts, IGNORED)

    def make_labels(self, step: int, cut: BatchSlice, device: torch.device) -> Tensor:
        """Return the same as `labels` on a device, without building the global batch."""
        recipe = self.case.recipe
        share = Share(tuple(cut.rows.tolist()), tuple(cut.positions.tolist()))
        return make_batch(recipe.data, recipe.model.vocab_size, recipe.seed, step, share, device).targets

    def find_source(
        self, field: BatchField, actual: Tensor, rank: int, step: int, micro_batch: int
    ) -> ReadSource:
        """Return the source of `actual` (M, s), read for a micro-batch. Masks are not supported."""
        if field is BatchField.POSITIONS and bool((actual == torch.arange(actual.shape[1])).all()):
            return ReadSource(kind=SourceKind.LOCAL)
        return (
            self._find_next(field, actual, step, self.cut(rank, micro_batch))
            or self._find_share(field, [(micro_batch, actual)], rank, step)
            or self._find_rows(field, actual, rank, step, micro_batch)
            or self._find_shift(field, actual, step, self.cut(rank, micro_batch))
            or ReadSource(kind=SourceKind.UNKNOWN)
        )

    def find_mask_source(
        self, field: BatchField, masks: Sequence[tuple[int, Tensor]], rank: int, step: int
    ) -> ReadSource | None:
        """Return the common source of all these masks (M, s) of a step, each with its micro-batch.

        Return None if no source is found, or if a match may be chance.
        """
        if all(bool(actual.all()) for _, actual in masks):
            return ReadSource(kind=SourceKind.ALL)
        left_out = self._find_left_out(field, masks, rank, step)
        if left_out is not None:
            return left_out
        label = self._find_label(field, masks, rank, step)
        if label is not None:
            return ReadSource(kind=SourceKind.LABEL, label=label)
        shifts = [self._find_shift(field, actual, step, self.cut(rank, number)) for number, actual in masks]
        if shifts[0] is not None and all(shift == shifts[0] for shift in shifts):
            return shifts[0]
        shares = len(list(self._list_shares(rank, step, masks[0][0])))
        length, data = self.case.recipe.data.seq_len, self.case.recipe.data
        lengths = 1 + int((1.0 - data.min_valid) * length)
        num_rows = sum(len(actual) for _, actual in masks)
        # A row has one of `lengths` lengths: this is about the chance that masks match some share.
        if shares * lengths**-num_rows > CHANCE:
            return None
        return self._find_share(field, masks, rank, step)

    def _find_left_out(
        self, field: BatchField, masks: Sequence[tuple[int, Tensor]], rank: int, step: int
    ) -> ReadSource | None:
        """Return the positions that these masks leave out in every row, if nothing else is wrong with them.

        Tried before a shift: where rows extend beyond the rank's positions, a shifted mask looks the same.
        Only the omitted positions are observable.
        """
        cuts = [self.cut(rank, number) for number, _ in masks]
        read = torch.cat([actual for _, actual in masks])
        own = torch.cat([self.values(field, step, cut) for cut in cuts])
        without = (own & ~read).any(dim=0)
        if not without.any() or 2 * int(without.sum()) > len(without):
            return None
        if not torch.equal(read, own & ~without):
            return None
        return ReadSource(kind=SourceKind.WITHOUT, positions=tuple(cuts[0].positions[without].tolist()))

    def _find_label(
        self, field: BatchField, masks: Sequence[tuple[int, Tensor]], rank: int, step: int
    ) -> int | None:
        """Return the one label whose tokens these masks leave out of the valid ones; None if there is none.

        This happens where padding is recognized by its token id, which may also end a text. A single
        left-out token would have a single label by chance, so at least two are required.
        """
        cuts = [self.cut(rank, number) for number, _ in masks]
        read = torch.cat([actual for _, actual in masks])
        own = torch.cat([self.values(field, step, cut) for cut in cuts])
        labels = torch.cat([self.values(BatchField.LABELS, step, cut) for cut in cuts])
        left_out = labels[own & ~read].tolist()
        if len(left_out) < 2 or len(set(left_out)) != 1:
            return None
        return int(left_out[0]) if torch.equal(read, own & (labels != left_out[0])) else None

    def _find_next(self, field: BatchField, actual: Tensor, step: int, cut: BatchSlice) -> ReadSource | None:
        """Match labels with the rank's own tokens, one position later: shifted after the batch was split."""
        if field is not BatchField.LABELS or len(cut.positions) == 1:
            return None
        following = self.values(BatchField.TOKENS, step, cut)[:, 1:]
        is_next = is_same(field, actual[:, :-1], following)
        return ReadSource(kind=SourceKind.NEXT) if is_next else None

    def _list_steps(self, step: int) -> list[int]:
        others = sorted(range(self.case.recipe.steps + 1), key=lambda each: (abs(each - step), each))
        return others[:MOST_STEPS]

    def _list_shares(self, rank: int, step: int, micro_batch: int) -> Iterator[tuple[int, int, int]]:
        """Yield (step, rank, micro-batch) of all other shares, nearest first."""
        plan, layout = self.plan, self.case.layout
        own = plan.coordinates(rank)

        def distance(other: int) -> int:
            place = plan.coordinates(other)
            return sum(place[axis] != own[axis] for axis in own)

        ranks = sorted(range(plan.world_size), key=lambda other: (distance(other), other))
        batches = sorted(range(layout.micro_batches), key=lambda other: (other != micro_batch, other))
        for other_step in self._list_steps(step):
            for other in ranks:
                for number in batches:
                    if (other_step, other, number) != (step, rank, micro_batch):
                        yield other_step, other, number

    def _find_share(
        self, field: BatchField, read: Sequence[tuple[int, Tensor]], rank: int, step: int
    ) -> ReadSource | None:
        """Return the share from which all these micro-batches were read.

        Each was read under its own number, or all were read from a single micro-batch.
        """
        first, _ = read[0]
        for other_step, other, number in self._list_shares(rank, step, first):
            cuts = [self.cut(other, own if number == first else number) for own, _ in read]
            if all(
                is_same(field, actual, self.values(field, other_step, cut))
                for (_, actual), cut in zip(read, cuts, strict=True)
            ):
                return ReadSource(
                    kind=SourceKind.SHARE,
                    step=None if other_step == step else other_step,
                    rank=None if other == rank else other,
                    micro_batch=None if number == first else number,
                )
        return None

    def _find_rows(
        self, field: BatchField, actual: Tensor, rank: int, step: int, micro_batch: int
    ) -> ReadSource | None:
        if field not in (BatchField.TOKENS, BatchField.LABELS):
            return None
        positions = self.cut(rank, micro_batch).positions
        every = torch.arange(self.case.recipe.data.batch)
        for other_step in self._list_steps(step):
            wanted = self.values(field, other_step, BatchSlice(every, positions))
            found = [
                next((row for row, values in enumerate(wanted) if is_same(field, each, values)), None)
                for each in actual
            ]
            rows = [row for row in found if row is not None]
            if len(rows) < len(found):
                continue
            own = {
                row for number in range(self.case.layout.micro_batches) for row in self._rows(rank, number)
            }
            is_order = other_step == step and own.issuperset(rows) and len(set(rows)) == len(rows)
            return ReadSource(
                kind=SourceKind.ORDER if is_order else SourceKind.ROWS,
                step=None if other_step == step else other_step,
                rows=tuple(rows[:MOST_ROWS]),
            )
        return None

    def _rows(self, rank: int, micro_batch: int) -> list[int]:
        rows: list[int] = self.cut(rank, micro_batch).rows.tolist()
        return rows

    def _find_shift(self, field: BatchField, actual: Tensor, step: int, cut: BatchSlice) -> ReadSource | None:
        """Match the values of positions shifted by a constant, in the row or within the rank's part of it."""
        length = self.case.recipe.data.seq_len
        own = self.values(field, step, cut)
        for shift in sorted(range(-(length // 2), length // 2 + 1), key=abs):
            if shift == 0:
                continue
            inside = (cut.positions + shift >= 0) & (cut.positions + shift < length)
            shifted = BatchSlice(cut.rows, (cut.positions + shift).clamp(0, length - 1))
            is_in_row = _mostly(inside) and is_same(
                field, actual[:, inside], self.values(field, step, shifted)[:, inside]
            )
            if is_in_row or _is_rolled(field, actual, own, shift):
                return ReadSource(kind=SourceKind.SHIFT, shift=shift)
        return None


def is_same(field: BatchField, actual: Tensor, wanted: Tensor) -> bool:
    """Return whether two tensors of a field have the same shape and values.

    Labels are compared only where `actual` is not `IGNORED`. They differ if all of `actual` is ignored.
    """
    if actual.shape != wanted.shape:
        return False
    if field is not BatchField.LABELS:
        return torch.equal(actual, wanted)
    counts = actual != IGNORED
    return bool(counts.any()) and torch.equal(actual[counts], wanted[counts])


def _is_rolled(field: BatchField, actual: Tensor, own: Tensor, shift: int) -> bool:
    """Return whether `actual` (M, s) is `own` shifted by `shift` positions.

    At least half of the positions must overlap.
    """
    size = actual.shape[1] - abs(shift)
    if size < max(1, actual.shape[1] // 2):
        return False
    begin, other = max(-shift, 0), max(shift, 0)
    return is_same(field, actual[:, begin : begin + size], own[:, other : other + size])


def _mostly(inside: Tensor) -> bool:
    return 2 * int(inside.sum()) >= inside.numel()


def count_wrong(actual: Tensor, wanted: Tensor) -> int:
    """Return the number of elements that differ."""
    return int((actual != wanted).sum())


def list_sequences(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Return the rows of some micro-batches (M, s), sorted: equal lists hold the same rows in any order."""
    return sorted(tuple(row) for tensor in tensors for row in tensor.tolist())
