"""Check that every rank read its own tokens, labels, positions and masks in every micro-batch.

A batch is a function of seed, step, row and position, so the case alone determines the data each rank has
to read. The check records the data at their use, not at their creation. It compares them with the case, not
with the share that the tested program computes.

Tokens are the ids that the embedding looks up. Labels are the targets of torch's cross entropy. Positions
and padding masks are the arguments of the reference model's blocks. Recomputed passes do not count, nor do
passes from which a pipeline learns shapes.

A user's own model or step may use its batch in unknown ways. There a reading is wrong only if it belongs to
another rank, step or micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from moeverify.cases.schema import Case
from moeverify.model.transformer import TransformerBlock
from moeverify.parallel.regions.local_shard import logical_name
from moeverify.parallel.regions.passes import is_in_backward, is_trial_pass
from moeverify.parallel.regions.placement import local_part
from moeverify.parallel.regions.unseen import unseen
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName
from moeverify.results.data import BatchField, DataFacts, Misread, MisreadOnRank, ReadSource, SourceKind
from moeverify.results.finding import Finding
from moeverify.results.place import Place, Stage
from moeverify.train.data import IGNORED
from moeverify.train.program import TrainingProgram
from moeverify.verification.checks.base import (
    Check,
    CheckOutcome,
    RankRun,
    Role,
    ShownTensors,
    Watch,
    make_outcome,
)
from moeverify.verification.checks.data_source import ExpectedData, count_wrong, is_same, list_sequences

Reads = dict[tuple[int, BatchField], dict[str, list[Tensor]]]
"""Micro-batches (M, s) in the order of their passes, by (step, kind of data) and reading module."""

MODEL = ""  # the name of the model itself, and of the loss


class DataReads:
    """Hooks on one rank's model and on torch's cross entropy, active until `remove` is called.

    A tensor counts as a micro-batch if it has `num_tokens` elements; it is stored in rows of `length`. An
    embedding with fewer than `vocab_size` rows is a position table, or a shard of a table. Its ids mean
    something else, so it is ignored.
    """

    def __init__(self, model: nn.Module, vocab_size: int, num_tokens: int, length: int) -> None:
        self.step = -1
        self.reads: Reads = {}
        self._num_tokens = num_tokens
        self._length = length
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(
                unseen(self._make_hook(MODEL, BatchField.TOKENS, 0, "")), with_kwargs=True
            )
        ]
        firsts: set[str] = set()
        for name, module in model.named_modules():
            stage = name.partition("layers")[0]
            if isinstance(module, nn.Embedding) and module.num_embeddings >= vocab_size:
                self._add(module, name, BatchField.TOKENS, 0, "input")
            elif isinstance(module, TransformerBlock) and stage not in firsts:
                firsts.add(stage)  # all blocks of a stage receive the same arguments
                self._add(module, name, BatchField.POSITIONS, 1, "positions")
                self._add(module, name, BatchField.MASK, 2, "valid")
        self._original: Callable[..., Any] = functional.cross_entropy
        functional.cross_entropy = self._wrap_loss(self._original)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        if self._handles:
            functional.cross_entropy = self._original
        self._handles = []

    def _add(self, module: nn.Module, name: str, field: BatchField, place: int, argument: str) -> None:
        hook = self._make_hook(logical_name(name), field, place, argument)
        self._handles.append(module.register_forward_pre_hook(unseen(hook), with_kwargs=True))

    def _make_hook(self, name: str, field: BatchField, place: int, argument: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            if not torch.compiler.is_compiling():
                self._keep(name, field, inputs[place] if len(inputs) > place else named.get(argument))

        return hook

    def _wrap_loss(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def cross_entropy(input: Tensor, target: Tensor, *rest: Any, **named: Any) -> Any:
            if not torch.compiler.is_compiling():
                self._keep(MODEL, BatchField.LABELS, target)
            return original(input, target, *rest, **named)

        return cross_entropy

    @torch.no_grad()
    def _keep(self, name: str, field: BatchField, value: Any) -> None:
        if not isinstance(value, Tensor) or value.is_floating_point() or self.step < 0:
            return
        if is_in_backward() or is_trial_pass():
            return
        local = local_part(value)
        if local.numel() == self._num_tokens:
            # A copy, since a loop may refill one buffer for each micro-batch. It is stored in a small dtype
            # because it is kept until the end.
            small = torch.bool if local.dtype is torch.bool else torch.int32
            read = local.detach().reshape(-1, self._length).to(small, copy=True)
            self.reads.setdefault((self.step, field), {}).setdefault(name, []).append(read)


MOST_EXPLAINED = 16
"""Maximum number of wrong micro-batches per rank whose source is searched. Usually all have the same source."""
MOST_REPORTED = 8

_CERTAIN = frozenset(
    {
        SourceKind.SHARE,
        SourceKind.ORDER,
        SourceKind.ROWS,
        SourceKind.SHIFT,
        SourceKind.NEXT,
        SourceKind.UNREAD,
    }
)


class DataReport:
    """Readings of one rank: the number of compared micro-batches, and the wrong ones."""

    def __init__(self, num_compared: int, misread: Sequence[Misread]) -> None:
        self.num_compared = num_compared
        self.misread = tuple(misread)


class DataWatch(Watch[DataReport]):
    """Keeps the data that this rank's model and loss read, and compares it after the run."""

    def __init__(self, case: Case, program: TrainingProgram, rank: int) -> None:
        self._case = case
        self._rank = rank
        self._is_own = program.custom_step is not None or case.recipe.model.reference is None
        self._expected = ExpectedData(case)
        self._reordered: set[int] = set()
        cut = self._expected.cut(rank, 0)
        sizes = len(cut.rows) * len(cut.positions), len(cut.positions)
        self._reads = DataReads(program.model, case.recipe.model.vocab_size, *sizes)

    def begin_step(self, step: int) -> None:
        """Record the number of the step; see `Watch`."""
        self._reads.step = step

    def close(self) -> None:
        """Remove the hooks; see `Watch`."""
        self._reads.remove()

    def report(self) -> DataReport:
        """Return the wrong readings; see `Watch`."""
        misread: list[Misread] = []
        num_compared = 0
        # A module that reads a kind of data reads it in every step. A pipeline stage may have no tokens or
        # no labels.
        readers = {(field, name) for (_, field), by_name in self._reads.reads.items() for name in by_name}
        steps = sorted({step for step, _ in self._reads.reads})
        for step in steps:
            for field in BatchField:
                names = sorted(name for each, name in readers if each is field)
                if field is BatchField.TOKENS and len(names) > 1:
                    names = [name for name in names if name != MODEL]  # modules are closer to the computation
                by_name = self._reads.reads.get((step, field), {})
                read = [[_widen(each) for each in by_name.get(name, ())] for name in names]
                num_compared += sum(map(len, read))
                explain = len(misread) < MOST_EXPLAINED
                misread += self._compare(step, field, read, explain=explain)
        return DataReport(num_compared, misread)

    def _compare(
        self, step: int, field: BatchField, by_reader: Sequence[list[Tensor]], *, explain: bool
    ) -> list[Misread]:
        """Return the wrong readings of one kind in one step, taken from the first reader with any.

        For a user's own code, one correct reader is enough to return none.
        """
        found: list[list[Misread]] = []
        for read in by_reader:
            misread = list(self._compare_one(step, field, read, explain=explain))
            if self._is_own and misread and self._may_be_own(step, field, read):
                misread = []
            found.append(misread)
        wrong = [each for each in found if each]
        if not wrong or (self._is_own and len(wrong) < len(found)):
            return []
        if self._is_own:
            return [each for each in wrong[0] if each.source.kind in _CERTAIN]
        return wrong[0]

    def _may_be_own(self, step: int, field: BatchField, read: Sequence[Tensor]) -> bool:
        """Return whether a user's own code may read this: another number of passes, or its rows reordered.

        Labels may be reordered only in steps whose tokens are.
        """
        if len(read) != self._case.layout.micro_batches:
            return True
        if field is BatchField.TOKENS and self._has_all(step, field, read):
            self._reordered.add(step)
            return True
        return step in self._reordered and self._has_all(step, field, read)

    def _has_all(self, step: int, field: BatchField, read: Sequence[Tensor]) -> bool:
        """Return whether all rows of a step were read exactly once, in any order."""
        numbers = range(self._case.layout.micro_batches)
        cuts = [self._expected.cut(self._rank, number) for number in numbers]
        if field is BatchField.LABELS:
            wanted = [self._expected.labels(step, cut) for cut in cuts]
        else:
            wanted = [self._expected.values(field, step, cut) for cut in cuts]
        return list_sequences(read) == list_sequences(wanted)

    def _compare_one(
        self, step: int, field: BatchField, read: Sequence[Tensor], *, explain: bool
    ) -> Iterator[Misread]:
        num = self._case.layout.micro_batches
        if len(read) != num:
            yield from self._list_unread(step, field, read)
            return
        masks: list[tuple[int, Tensor]] = []
        for number, actual in enumerate(read):
            cut = self._expected.cut(self._rank, number)
            wanted = self._expected.labels(step, cut) if field is BatchField.LABELS else None
            counts = actual
            if wanted is not None:
                counts = actual != IGNORED
                both = counts & (wanted != IGNORED)
                num_wrong = count_wrong(actual[both], wanted[both])
            else:
                own = self._expected.values(field, step, cut)
                num_wrong = 0 if field is BatchField.MASK else count_wrong(actual, own)
            if num_wrong:
                found = self._make(step, field, number, actual, num_wrong, explain=explain)
                yield found
                if field is not BatchField.LABELS or found.source.kind is not SourceKind.UNKNOWN:
                    continue  # labels of another batch also have its padding
            masks.append((number, counts))
        if field in (BatchField.LABELS, BatchField.MASK):
            yield from self._list_masks(
                step, BatchField.LOSS_MASK if field is BatchField.LABELS else field, masks
            )

    def _list_masks(
        self, step: int, field: BatchField, masks: Sequence[tuple[int, Tensor]]
    ) -> Iterator[Misread]:
        """Yield the wrong masks.

        Single lengths may be equal by chance, so the source is searched for all masks together.
        """
        wrong = []
        for number, actual in masks:
            wanted = self._expected.values(field, step, self._expected.cut(self._rank, number))
            if not torch.equal(actual, wanted):
                wrong.append((number, actual, count_wrong(actual, wanted)))
        if not wrong or (field is BatchField.LOSS_MASK and all(bool(actual.all()) for _, actual in masks)):
            return  # a loss that is masked afterwards, per token, receives the labels of all tokens
        pairs = [(number, actual) for number, actual, _ in wrong]
        find = self._expected.find_mask_source
        source = find(field, masks, self._rank, step) or find(field, pairs, self._rank, step)
        for number, actual, num_wrong in wrong:
            yield self._make(step, field, number, actual, num_wrong, source, explain=False)

    def _make(
        self,
        step: int,
        field: BatchField,
        number: int,
        actual: Tensor,
        num_wrong: int,
        source: ReadSource | None = None,
        *,
        explain: bool = True,
    ) -> Misread:
        if source is None and explain:
            source = self._expected.find_source(field, actual, self._rank, step, number)
        source = source or ReadSource(kind=SourceKind.UNKNOWN)
        return Misread(
            batch=field,
            step=step,
            micro_batch=number,
            num_micro_batches=self._case.layout.micro_batches,
            num_wrong=num_wrong,
            num_elements=actual.numel(),
            source=source,
        )

    def _list_unread(self, step: int, field: BatchField, read: Sequence[Tensor]) -> Iterator[Misread]:
        """Yield the micro-batches that were not read, if passes and micro-batches differ in number."""
        for number in range(self._case.layout.micro_batches):
            wanted = self._expected.values(field, step, self._expected.cut(self._rank, number))
            if not any(is_same(field, each, wanted) for each in read):
                unread = ReadSource(kind=SourceKind.UNREAD)
                yield self._make(step, field, number, wanted, wanted.numel(), unread)


def _widen(read: Tensor) -> Tensor:
    """Return a stored reading on the CPU, in its original dtype."""
    return read.cpu() if read.dtype is torch.bool else read.to("cpu", torch.int64)


class DataCheck(Check[DataReport]):
    """The batch, as every rank's model and loss read it."""

    name = CheckName.DATA
    role = Role.ORIGIN
    sees_inside = True

    def watch(self, run: RankRun, program: TrainingProgram) -> Watch[DataReport] | None:
        """Return a watch that keeps the readings; see `Check`."""
        return DataWatch(run.case, program, torch.distributed.get_rank())

    def judge(self, shown: ShownTensors, reports: Sequence[DataReport]) -> CheckOutcome | None:
        """Return the verdict, with a finding for each step with wrong readings; see `Check`."""
        num_compared = sum(report.num_compared for report in reports)
        if num_compared == 0:
            return None
        by_step: dict[int, list[MisreadOnRank]] = {}
        for rank, report in enumerate(reports):
            for misread in report.misread:
                by_step.setdefault(misread.step, []).append(MisreadOnRank(rank=rank, misread=misread))
        findings = [_make_finding(shown, step, read) for step, read in sorted(by_step.items())]
        return make_outcome(self.name, findings, num_compared)


def _make_finding(shown: ShownTensors, step: int, read: Sequence[MisreadOnRank]) -> Finding:
    order: Mapping[BatchField, int] = {field: number for number, field in enumerate(BatchField)}
    # Readings with a known source come first: they explain more than the earliest ones.
    ordered = sorted(
        read,
        key=lambda each: (
            each.misread.source.kind is SourceKind.UNKNOWN,
            order[each.misread.batch],
            each.misread.micro_batch,
            each.rank,
        ),
    )
    head = ordered[0]
    same = [each for each in ordered if each.misread.batch is head.misread.batch]
    also = {each.misread.batch for each in ordered if each.misread.source == head.misread.source}
    ranks = tuple(sorted({each.rank for each in read}))
    return shown.make_finding(
        CheckName.DATA,
        (step, "", head.misread.batch.value),
        ranks,
        rank=head.rank,
        error=head.misread.num_wrong / head.misread.num_elements,
        code=Cause.DATA,
        facts=DataFacts(
            read=tuple(same[:MOST_REPORTED]),
            also=tuple(field for field in BatchField if field in also - {head.misread.batch}),
            num_more=max(0, len(same) - MOST_REPORTED),
        ),
        place=Place(ranks=ranks, stage=Stage.DATA),
    )


CHECKS = (DataCheck(),)
