"""Data read by ranks, right and with bugs of every kind, against the data that the case prescribes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from moeverify.cases.schema import Case
from moeverify.report.words.cause import describe_cause, describe_evidence
from moeverify.results.data import BatchField
from moeverify.results.finding import Finding
from moeverify.train.data import IGNORED
from moeverify.verification.checks.data import DataCheck, DataReport, DataWatch
from moeverify.verification.checks.data_source import BatchSlice, ExpectedData

VOCABULARY = 40
ROWS, LENGTH, STEPS, MICRO_BATCHES = 8, 16, 3, 2
Read = dict[BatchField, Tensor]
Bug = Callable[[ExpectedData, int, int, int, Read], None]


class Model(nn.Module):
    """The first and last module of a model, which read the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.embed(tokens)
        return logits


class Program:
    """The parts of a program that a watch needs."""

    custom_step = None

    def __init__(self) -> None:
        self.model = Model()


def make_case(**layout: object) -> Case:
    recipe = {
        "name": "tiny",
        "seed": 7,
        "steps": STEPS,
        "model": {
            "vocab_size": VOCABULARY,
            "hidden": 8,
            "num_layers": 1,
            "num_heads": 2,
            "num_kv_heads": 2,
            "head_dim": 4,
            "ffn_hidden": 8,
        },
        "data": {"batch": ROWS, "seq_len": LENGTH, "min_valid": 0.5},
        "optimizer": {"name": "sgd", "lr": 0.1},
    }
    fields = {"dp_shard": 2, "micro_batches": MICRO_BATCHES} | layout
    return Case.model_validate({"name": "data", "recipe": recipe, "layout": fields})


class OwnStep(Program):
    """A program whose steps a user has written."""

    custom_step = object()  # type: ignore[assignment]


def read_all(case: Case, bug: Bug, make: type[Program] = Program) -> list[DataReport]:
    """Return the reports of two ranks that read the whole run, with a bug applied."""
    reports = []
    for rank in range(case.layout.world_size):
        expected, program = ExpectedData(case), make()
        watch = DataWatch(case, program, rank)  # type: ignore[arg-type]
        try:
            for step in range(STEPS):
                watch.begin_step(step)
                for number in range(case.layout.micro_batches):
                    cut = expected.cut(rank, number)
                    read = {
                        BatchField.TOKENS: expected.values(BatchField.TOKENS, step, cut),
                        BatchField.LABELS: expected.labels(step, cut),
                    }
                    bug(expected, rank, step, number, read)
                    logits = program.model(read[BatchField.TOKENS])
                    functional.cross_entropy(
                        logits.flatten(0, 1), read[BatchField.LABELS].flatten(), ignore_index=IGNORED
                    )
        finally:
            watch.close()
        reports.append(watch.report())
    return reports


def judge(run_ranks: Callable, reports: Sequence[DataReport]) -> list[Finding]:
    outcome = DataCheck().judge(run_ranks({0: {}}).shown(), reports)
    assert outcome is not None
    return list(outcome.findings)


def nothing(expected: ExpectedData, rank: int, step: int, number: int, read: Read) -> None:
    """Leave the data unchanged."""


def again(expected: ExpectedData, rank: int, step: int, number: int, read: Read) -> None:
    if rank == 1 and step == 1:
        put(expected, read, step, rank, 0)


def put(expected: ExpectedData, read: Read, step: int, rank: int, number: int) -> None:
    cut = expected.cut(rank, number)
    read[BatchField.TOKENS] = expected.values(BatchField.TOKENS, step, cut)
    read[BatchField.LABELS] = expected.labels(step, cut)


def first_step(expected: ExpectedData, rank: int, step: int, number: int, read: Read) -> None:
    put(expected, read, 0, rank, number)


def one_rank(expected: ExpectedData, rank: int, step: int, number: int, read: Read) -> None:
    put(expected, read, step, 0, number)


def reversed_rows(expected: ExpectedData, rank: int, step: int, number: int, read: Read) -> None:
    for what in read:
        read[what] = read[what].flip(0)


def shifted_labels(expected: ExpectedData, rank: int, step: int, number: int, read: Read) -> None:
    labels = read[BatchField.LABELS].roll(-2, 1)
    labels[:, -2:] = IGNORED
    read[BatchField.LABELS] = labels


def shifted_after_the_cut(expected: ExpectedData, rank: int, step: int, number: int, read: Read) -> None:
    """Shift the labels of this rank's part of a row: its last position gets none."""
    counts = read[BatchField.LABELS] != IGNORED
    labels = read[BatchField.TOKENS].roll(-1, 1).masked_fill(~counts, IGNORED)
    labels[:, -1] = IGNORED
    read[BatchField.LABELS] = labels


def without_the_first(expected: ExpectedData, rank: int, step: int, number: int, read: Read) -> None:
    read[BatchField.LABELS] = read[BatchField.LABELS].clone()
    read[BatchField.LABELS][:, :2] = IGNORED


def without_a_label(expected: ExpectedData, rank: int, step: int, number: int, read: Read) -> None:
    """Drop a label that some tokens of each rank have, as padding is excluded by its token."""
    label = most_common(expected, rank, step)
    read[BatchField.LABELS] = read[BatchField.LABELS].masked_fill(read[BatchField.LABELS] == label, IGNORED)


def without_half_a_label(expected: ExpectedData, rank: int, step: int, number: int, read: Read) -> None:
    label, labels = most_common(expected, rank, step), read[BatchField.LABELS]
    kept = (labels == label).flatten().cumsum(0).view(labels.shape) == 1
    read[BatchField.LABELS] = labels.masked_fill((labels == label) & ~kept, IGNORED)


def most_common(expected: ExpectedData, rank: int, step: int) -> int:
    labels = torch.cat([expected.labels(step, expected.cut(rank, each)) for each in range(MICRO_BATCHES)])
    return int(labels[labels != IGNORED].mode().values)


def last_of_rank(expected: ExpectedData, rank: int, step: int, number: int, read: Read) -> None:
    if rank == 0:
        read[BatchField.LABELS] = read[BatchField.LABELS].clone()
        read[BatchField.LABELS][:, -2:] = IGNORED


def shorter_rows(expected: ExpectedData, rank: int, step: int, number: int, read: Read) -> None:
    """Treat each row as one token shorter than it is."""
    cut = expected.cut(rank, number)
    counts = expected.values(BatchField.LOSS_MASK, step, BatchSlice(cut.rows, cut.positions + 1))
    read[BatchField.LABELS] = read[BatchField.LABELS].masked_fill(~counts, IGNORED)


def other_labels(expected: ExpectedData, rank: int, step: int, number: int, read: Read) -> None:
    read[BatchField.LABELS] = expected.labels(step, expected.cut(rank, 1 - number))


def other_mask(expected: ExpectedData, rank: int, step: int, number: int, read: Read) -> None:
    cut = expected.cut(rank, number)
    counts = expected.values(BatchField.LOSS_MASK, step + 1, cut)
    read[BatchField.LABELS] = expected.values(BatchField.LABELS, step, cut).masked_fill(~counts, IGNORED)


def mask_after_the_loss(expected: ExpectedData, rank: int, step: int, number: int, read: Read) -> None:
    read[BatchField.LABELS] = read[BatchField.LABELS].clamp(min=0)


def rolled_tokens(expected: ExpectedData, rank: int, step: int, number: int, read: Read) -> None:
    read[BatchField.TOKENS] = read[BatchField.TOKENS].roll(1, 1)


def one_token(expected: ExpectedData, rank: int, step: int, number: int, read: Read) -> None:
    if rank == 0 and step == 2 and number == 1:
        read[BatchField.TOKENS] = read[BatchField.TOKENS].clone()
        read[BatchField.TOKENS][1, 3] = (read[BatchField.TOKENS][1, 3] + 1) % VOCABULARY


@pytest.mark.parametrize("read", [nothing, mask_after_the_loss])
def test_what_is_read_right_passes(run_ranks: Callable, read: Bug) -> None:
    reports = read_all(make_case(), read)
    assert [report.num_compared for report in reports] == [2 * STEPS * MICRO_BATCHES] * 2
    assert judge(run_ranks, reports) == []


@pytest.mark.parametrize(
    ("bug", "step", "said"),
    [
        (again, 1, "rank 1 reads the rows of micro-batch 0 again in micro-batch 1 of step 1"),
        (first_step, 1, "ranks 0-1 read the rows of step 0 in step 1"),
        (one_rank, 0, "rank 1 reads the rows of rank 0 in step 0"),
        (reversed_rows, 0, "ranks 0-1 read the rows in another order in step 0"),
        (shifted_labels, 0, "ranks 0-1 read labels shifted by 2 positions in step 0"),
        (other_labels, 0, "ranks 0-1 read the labels of micro-batch 1 in micro-batch 0 of step 0"),
        (other_mask, 0, "ranks 0-1 read the loss mask of step 1 in step 0"),
        (rolled_tokens, 0, "ranks 0-1 read tokens shifted by -1 positions in step 0"),
        (one_token, 2, "rank 0 reads wrong values for 1 of 32 tokens in micro-batch 1 of step 2"),
    ],
)
def test_what_was_read_instead_is_named(run_ranks: Callable, bug: Bug, step: int, said: str) -> None:
    first = judge(run_ranks, read_all(make_case(), bug))[0]
    assert first.step == step
    assert describe_cause(first).replace("ranks 0, 1", "ranks 0-1") == said


IN_RUNS = {"cp": 2, "dp_shard": 1, "context_parallel": "alltoall"}
IN_ZIGZAG = {"cp": 2, "dp_shard": 1, "context_parallel": "allgather"}


@pytest.mark.parametrize(
    ("bug", "layout", "said"),
    [
        (shifted_after_the_cut, IN_RUNS, "rank 0 reads a loss mask that leaves out position 7 of every row"),
        (
            shifted_after_the_cut,
            IN_ZIGZAG,
            "rank 0 reads its own next tokens as labels, where other tokens follow in the row",
        ),
        (last_of_rank, IN_RUNS, "rank 0 reads a loss mask that leaves out positions 6, 7 of every row"),
        (without_the_first, {}, "ranks 0-1 read a loss mask that leaves out positions 0, 1 of every row"),
        (shorter_rows, {}, "ranks 0-1 read a loss mask shifted by 1 position"),
    ],
)
def test_labels_that_are_lost_at_the_edges_are_named(
    run_ranks: Callable, bug: Bug, layout: dict[str, object], said: str
) -> None:
    first = judge(run_ranks, read_all(make_case(**layout), bug))[0]
    assert describe_cause(first).replace("ranks 0, 1", "ranks 0-1") == f"{said} in step 0"


def test_tokens_that_are_left_out_by_their_label_are_named(run_ranks: Callable) -> None:
    case = make_case()
    label = most_common(ExpectedData(case), 0, 0)
    first = judge(run_ranks, read_all(case, without_a_label))[0]
    said = f"rank 0 reads a loss mask that leaves out every token with the label {label} in step 0"
    assert describe_cause(first).replace("in micro-batch 0 of step 0", "in step 0") == said


def test_some_tokens_of_a_label_are_not_all(run_ranks: Callable) -> None:
    first = judge(run_ranks, read_all(make_case(), without_half_a_label))[0]
    assert "every token" not in describe_cause(first)


def test_the_tokens_of_another_row_tell_that_its_labels_are_too(run_ranks: Callable) -> None:
    first = judge(run_ranks, read_all(make_case(), again))[0]
    assert first.ranks == (1,)
    assert "the same applies to the labels" in describe_evidence(first)


def test_a_micro_batch_that_is_left_out_is_named(run_ranks: Callable) -> None:
    case = make_case()
    expected, program = ExpectedData(case), Program()
    watch = DataWatch(case, program, 0)  # type: ignore[arg-type]
    for step in range(2):
        watch.begin_step(step)
        for number in range(step, MICRO_BATCHES):
            program.model(expected.values(BatchField.TOKENS, step, expected.cut(0, number)))
    watch.close()
    (finding,) = judge(run_ranks, [watch.report()])
    assert describe_cause(finding) == "rank 0 reads no tokens of micro-batch 0 in step 1"


def test_positions_of_a_context_rank_are_its_own(run_ranks: Callable) -> None:
    case = make_case(dp_shard=1, cp=2)
    assert judge(run_ranks, read_all(case, nothing)) == []
    said = [describe_cause(each) for each in judge(run_ranks, read_all(case, one_rank))]
    assert said[0] == "rank 1 reads the rows of rank 0 in step 0"


def test_recomputed_passes_are_none_of_a_step(run_ranks: Callable) -> None:
    case = make_case()
    expected, program = ExpectedData(case), Program()
    watch = DataWatch(case, program, 0)  # type: ignore[arg-type]
    watch.begin_step(0)
    for number in range(MICRO_BATCHES):
        tokens = expected.values(BatchField.TOKENS, 0, expected.cut(0, number))
        torch.utils.checkpoint.checkpoint(program.model, tokens, use_reentrant=False).sum().backward()
    watch.close()
    assert watch.report().num_compared == MICRO_BATCHES


def last_first(expected: ExpectedData, rank: int, step: int, number: int, read: Read) -> None:
    put(expected, read, step, rank, MICRO_BATCHES - 1 - number)


def own_labels(expected: ExpectedData, rank: int, step: int, number: int, read: Read) -> None:
    read[BatchField.LABELS] = read[BatchField.LABELS].clone()
    read[BatchField.LABELS][:, ::2] = IGNORED


@pytest.mark.parametrize("bug", [nothing, last_first, own_labels])
def test_a_step_of_its_own_may_order_and_mask_as_it_likes(run_ranks: Callable, bug: Bug) -> None:
    assert judge(run_ranks, read_all(make_case(), bug, OwnStep)) == []


@pytest.mark.parametrize("bug", [again, first_step, one_rank, other_labels])
def test_a_step_of_its_own_reads_no_rows_of_others(run_ranks: Callable, bug: Bug) -> None:
    said = [describe_cause(each) for each in judge(run_ranks, read_all(make_case(), bug, OwnStep))]
    assert said == [describe_cause(each) for each in judge(run_ranks, read_all(make_case(), bug))]


def test_torch_has_its_own_loss_back_when_a_watch_is_closed() -> None:
    before = functional.cross_entropy
    watch = DataWatch(make_case(), Program(), 0)  # type: ignore[arg-type]
    assert functional.cross_entropy is not before
    watch.close()
    watch.close()
    assert functional.cross_entropy is before
