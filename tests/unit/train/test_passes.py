"""Forward passes outside the micro-batches: shape inference of a pipeline, validation, recomputation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from moeverify.explain.record import Recorder
from moeverify.results.data import BatchField
from moeverify.train.calls.hooks import install
from moeverify.train.calls.listener import Listener
from moeverify.train.module_taps import BACKWARD, FORWARD, Reading, Tap
from moeverify.verification.checks.data import MODEL, DataReads

ROWS, LENGTH, VOCABULARY, WIDTH, PARTS = 2, 3, 7, 4, 3
TOKENS = torch.arange(PARTS * ROWS * LENGTH).view(PARTS * ROWS, LENGTH) % VOCABULARY
TARGETS = (TOKENS + 1) % VOCABULARY


class Model(nn.Module):
    """An embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(tokens))
        return logits


@pytest.fixture
def model() -> Iterator[Model]:
    """Return a model in a world of one rank."""
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())  # type: ignore[no-untyped-call]
    try:
        yield Model().double()
    finally:
        dist.destroy_process_group()


def compute_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def run_pipeline(model: nn.Module) -> None:
    """Run a step of a pipeline without given shapes."""
    stage = PipelineStage(model, 0, 1, torch.device("cpu"))
    ScheduleGPipe(stage, PARTS, loss_fn=compute_loss).step(TOKENS, target=TARGETS)


def make_tap(model: nn.Module) -> Tap:
    return Tap(model, ROWS, LENGTH, scale=1.0, limit=1 << 20)


def list_outputs(tap: Tap, direction: str, module: str = "embed") -> list[Reading]:
    found = [each for each in tap.readings if (each.direction, each.module) == (direction, module)]
    return sorted((each for each in found if each.end == "output"), key=lambda each: each.micro_batch)


def test_a_tap_reads_no_pass_that_learns_the_shapes_of_a_pipeline(model: Model) -> None:
    tap = make_tap(model)
    with tap.reading():
        run_pipeline(model)
    right = model.embed(TOKENS).split(ROWS)
    outputs = list_outputs(tap, FORWARD)
    assert [each.micro_batch for each in outputs] == list(range(PARTS))
    assert all(torch.equal(each.local, wanted) for each, wanted in zip(outputs, right, strict=True))
    assert len(list_outputs(tap, BACKWARD)) == PARTS
    assert tap.num_passes == PARTS


def test_micro_batches_of_stages_without_a_common_root_have_their_numbers(model: Model) -> None:
    tap = make_tap(nn.ModuleDict({"stage": model}))
    with tap.reading():
        run_pipeline(model)
    outputs = list_outputs(tap, FORWARD, "stage.embed")
    assert len(list_outputs(tap, BACKWARD, "stage.embed")) == PARTS
    assert [each.micro_batch for each in outputs] == list(range(PARTS))
    assert all(
        torch.equal(each.local, wanted)
        for each, wanted in zip(outputs, model.embed(TOKENS).split(ROWS), strict=True)
    )


def test_what_a_pipeline_reads_to_learn_shapes_is_no_batch(model: Model) -> None:
    reads = DataReads(model, VOCABULARY, ROWS * LENGTH, LENGTH)
    reads.step = 0
    run_pipeline(model)
    reads.remove()
    for what, name, wanted in ((BatchField.TOKENS, "embed", TOKENS), (BatchField.LABELS, MODEL, TARGETS)):
        found = torch.cat(reads.reads[0, what][name])
        assert torch.equal(found.flatten().to(torch.int64), wanted.flatten())


def test_a_recorder_takes_no_end_of_a_module_from_a_pass_that_learns_shapes(model: Model) -> None:
    recorder = Recorder()
    recorder.name_modules(model)
    with recorder.recording():
        run_pipeline(model)
    ends = [each for each in recorder.program.ends if each.module == "embed" and not each.is_gradient]
    assert len(ends) == PARTS


class Heard(Listener):
    """A listener that records whether each pass of a model trains."""

    def __init__(self) -> None:
        super().__init__()
        self.trains: list[bool] = []

    def enter_model(self, module: nn.Module, frame: object, trains: bool) -> None:
        self.trains.append(trains)

    def fail(self, error: Exception) -> None:
        raise error


def test_a_listener_is_told_that_a_pass_which_learns_shapes_trains_nothing(model: Model) -> None:
    heard = Heard()
    hooks = install(heard)
    try:
        run_pipeline(model)
    finally:
        hooks.remove()
    assert heard.trains == [False] + PARTS * [True]


def test_validation_and_recomputation_are_of_no_micro_batch() -> None:
    model = Model().double()
    tap = make_tap(model)
    parts = TOKENS.split(ROWS)
    with tap.reading():
        with torch.no_grad():
            model(TOKENS.flip(0)[:ROWS])
        for number, part in enumerate(parts):
            logits: Tensor = (
                torch.utils.checkpoint.checkpoint(model, part, use_reentrant=False)
                if number == 0
                else model(part)
            )
            logits.sum().backward()
    outputs = list_outputs(tap, FORWARD)
    assert [each.micro_batch for each in outputs] == list(range(PARTS))
    assert all(torch.equal(each.local, model.embed(part)) for each, part in zip(outputs, parts, strict=True))
