"""Stop of `--debug` on a rank: at the finding's tensor, or at the first of its kind without a part of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import multiprocessing_pdb
from moeverify.faults.setting import make_case
from moeverify.train.assemble import assemble_single
from moeverify.train.loop import train
from moeverify.train.module_taps import Reading
from moeverify.verification.checks.observers import _Together
from moeverify.verification.golden.store import GoldenWriter, StoredGolden
from moeverify.verification.jobs import BlamedPlace, StopPoint
from moeverify.verification.worker.blamed_place import BlamedStop, is_at
from moeverify.verification.worker.debug import StopWatch, has_part
from moeverify.verification.worker.golden_reference import GoldenReference
from moeverify.verification.worker.observed import make_bounds
from moeverify.verification.worker.step_tap import read_golden_modules

CPU = torch.device("cpu")
OWN, ELSEWHERE = "layers.0.attention.q_proj.weight", "layers.7.attention.q_proj.weight"
CASE = make_case("stop", model={"num_layers": 1}, data={"batch": 2, "seq_len": 8})
Stop = tuple[str, str, tuple[str, ...]]


@pytest.fixture
def list_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Stop]:
    """Return the stops of a rank that trains with the watch, as (reason, function, names at the prompt)."""
    stops: list[Stop] = []

    def stop(reason: str, *, frame: FrameType, frame_locals: Mapping[str, object]) -> None:
        stops.append((reason, frame.f_code.co_name, tuple(frame_locals)))

    monkeypatch.setattr(multiprocessing_pdb, "stop", stop)
    return stops


def make_golden(folder: Path) -> StoredGolden:
    with GoldenWriter(folder) as writer:
        train(CASE.recipe, assemble_single(CASE.recipe, CPU), writer, num_steps=1)
        writer.finish({}, {})
    return StoredGolden(folder)


def train_to(at: StopPoint, folder: Path) -> bool:
    golden = make_golden(folder)
    program = assemble_single(CASE.recipe, CPU)
    reference = GoldenReference(program, golden, make_bounds(CASE, golden))
    watch = StopWatch(at, golden, reference, has_part(at, program))
    train(CASE.recipe, program, _Together([watch]), num_steps=1)
    return watch.report()


@pytest.fixture
def group() -> Iterator[None]:
    """Set up a job of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def stop_at_place(place: BlamedPlace, folder: Path, stops: list[dict[str, Any]]) -> None:
    """Train one step with another attention in layer 0, and return a rank's stops and the shown tensors."""
    golden = make_golden(folder)
    program = assemble_single(CASE.recipe, CPU)
    with torch.no_grad():
        program.model.get_parameter("layers.0.attention.o_proj.weight").mul_(3.0)
    readings = [each for each in read_golden_modules(CASE.recipe, golden, 0, CPU) if is_at(place, each)]

    def stop(about: str, frame: FrameType | None, values: Mapping[str, Any]) -> None:
        own = frame.f_locals.get("self") if frame is not None else None
        stops.append({"about": about, "self": own, "function": frame and frame.f_code.co_name, **values})

    reference = GoldenReference(program, golden, make_bounds(CASE, golden))
    blamed = BlamedStop(CASE, 0, program, place, readings, stop, reference.show)
    at = StopPoint(kind="loss", tensor="total", step=0, about="loss", place=place)
    watch = StopWatch(at, golden, reference, has_part=True, blamed=blamed)
    with closing(watch):
        train(CASE.recipe, program, _Together([watch]), num_steps=1)
    assert watch.report()
    assert sys.getprofile() is None
    if stops and "actual" in stops[0]:
        (row,) = reference.compare(stops[0]["actual"], lambda: None)
        stops[0]["row"] = row


@pytest.mark.parametrize(
    ("module", "inner", "direction", "title"),
    [
        ("layers.0.attention", "", "forward", "module output layers.0.attention at step 0"),
        # The block makes the norm's input: the rank stops there, at the line that calls the norm.
        ("layers.0", "layers.0.ffn_norm", "forward", "module output layers.0.ffn_norm at step 0"),
        ("layers.0.mlp", "", "backward", "module gradient layers.0.mlp at step 0"),
    ],
)
def test_a_rank_stops_once_inside_the_module_that_is_blamed(
    list_stops: list[Stop], tmp_path: Path, module: str, inner: str, direction: Any, title: str
) -> None:
    stops: list[dict[str, Any]] = []
    place = BlamedPlace(about="it", module=module, inner=inner, direction=direction)
    stop_at_place(place, tmp_path / "g", stops)
    (seen,) = stops
    assert list_stops == []  # not at the loss again
    assert (seen["about"], seen["row"].name) == ("it", title)
    assert seen["expected"].shape == seen["actual"].shape
    assert not torch.allclose(seen["actual"], seen["expected"])
    assert seen["row"].squared_error > (seen["row"].bound * seen["row"].norm) ** 2
    if not inner and direction == "forward":
        assert (seen["function"], type(seen["self"]).__name__) == ("forward", "Attention")


@pytest.mark.parametrize(("direction", "is_shown"), [("forward", True), ("backward", False)])
def test_of_what_is_one_for_all_rows_a_rank_has_a_part_of_the_gradient(
    tmp_path: Path, direction: Any, is_shown: bool
) -> None:
    # Rotary embeddings (1, S, D) beside a batch of two rows.
    tables = torch.ones(1, 8, 4)
    place = BlamedPlace(about="it", module="rotary", direction=direction)
    expected = [Reading(direction, 0, "rotary", "output", 0, tables)]
    program = assemble_single(CASE.recipe, CPU)
    blamed = BlamedStop(CASE, 0, program, place, expected, print, print)
    value = blamed._find_value(tables, micro_batch=0, slot="0")
    assert (value is not None) == is_shown


def test_a_module_that_is_elsewhere_leaves_the_stop_at_the_tensor(
    list_stops: list[Stop], tmp_path: Path
) -> None:
    place = BlamedPlace(about="it", module="layers.7.attention")
    stop_at_place(place, tmp_path / "g", [])
    assert [reason for reason, _, _ in list_stops] == ["loss"]


def test_a_rank_with_the_tensor_stops_in_the_loop_with_both_values(
    list_stops: list[Stop], tmp_path: Path
) -> None:
    assert train_to(StopPoint(kind="gradient", tensor=OWN, step=0, about="it"), tmp_path / "g")
    assert list_stops == [("it", "train_step", ("expected", "actual", "region"))]


@pytest.mark.parametrize("kind", ["gradient", "initial_weight", "optimizer_state"])
def test_a_rank_without_it_stops_once_at_the_first_of_its_kind(
    list_stops: list[Stop], tmp_path: Path, kind: str
) -> None:
    name = f"{ELSEWHERE}.momentum_buffer" if kind == "optimizer_state" else ELSEWHERE
    at = StopPoint(kind=kind, tensor=name, step=-1 if kind == "initial_weight" else 0, about="it")
    assert train_to(at, tmp_path / "g")
    assert [(reason, names) for reason, _, names in list_stops] == [
        ("it, of which this rank has no part", ())
    ]


def test_what_has_no_parameter_is_made_by_every_rank(list_stops: list[Stop], tmp_path: Path) -> None:
    assert train_to(StopPoint(kind="loss", tensor="total", step=0, about="it"), tmp_path / "g")
    assert [reason for reason, _, _ in list_stops] == ["it"]
