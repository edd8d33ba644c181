"""Sketches add up over shards and find differences; a streamed run equals the run of the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moeverify.cases.schema import Data, MoE, Optimizer, Recipe, ReferenceModel
from moeverify.errors import CaseError
from moeverify.parallel.regions.region import Region
from moeverify.parallel.regions.sketch import WIDTH, Grid, estimate_squares, hash_blocks, sketch
from moeverify.train.assemble import assemble_single
from moeverify.train.loop import train
from moeverify.verification.golden.sketched import SketchRecorder, add_sketches, make_sketch, measure_squares
from moeverify.verification.golden.store import StoredGolden
from moeverify.verification.golden_run.streamed import StreamedRun, Visit, list_visits, make_sketched_golden
from moeverify.verification.golden_run.streamed_unit import Numerics

CPU = torch.device("cpu")
SHAPES = [(7,), (300,), (6, 10), (100, 37), (8, 24, 16), (3, 5, 4, 6), (130, 6, 4)]


def make_recipe(**changes: object) -> Recipe:
    moe = MoE(
        num_experts=4,
        top_k=2,
        expert_hidden=24,
        balance_coef=0.1,
        z_coef=0.1,
        selection_bias_rate=0.1,
        balance_scope="batch",
    )
    model = ReferenceModel(
        vocab_size=40,
        hidden=48,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        ffn_hidden=32,
        num_dense_layers=1,
        moe=moe,
    )
    fields = {
        "name": "r",
        "model": model,
        "data": Data(batch=3, seq_len=8, min_valid=0.5),
        "optimizer": Optimizer(clip_norm=0.1, weight_decay=0.1),
    }
    return Recipe(**{**fields, **changes})


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
def test_sketches_and_hashes_of_shards_add_up(shape: tuple[int, ...]) -> None:
    values, whole = draw(*shape), Region.whole(shape)
    size, last = values.numel(), shape[-1]
    runs = [Region.run(shape, 0, size // 3), Region.run(shape, size // 3, size)]
    zigzag = [Region.box(shape, [*map(range, shape[:-1]), tuple(range(at, last, 2))]) for at in range(2)]
    for parts in (runs, zigzag):
        total = sum(sketch(part.take(values), part) for part in parts)
        torch.testing.assert_close(total, sketch(values, whole), atol=1e-12, rtol=1e-12)
        assert torch.equal(
            sum(hash_blocks(part.take(values), part) for part in parts), hash_blocks(values, whole)
        )
        assert torch.equal(sum(Grid.of(shape).count_in(part) for part in parts), Grid.of(shape).count())


def test_an_error_is_found_in_its_block_with_its_size() -> None:
    right, shape = draw(8, 64, 32), (8, 64, 32)
    wrong = right.clone()
    wrong[5] *= 1.25
    expected, actual = (sketch(each, Region.whole(shape)) for each in (right, wrong))
    squares = estimate_squares(expected, actual)
    places = {Grid.of(shape).locate(block)[0] for block in (squares > 1e-12).nonzero().reshape(-1).tolist()}
    assert places == {range(5, 6)}
    assert float(squares.sum().sqrt() / (wrong - right).norm()) == pytest.approx(1.0, abs=0.5)


def test_hashes_tell_the_last_bit_and_merge() -> None:
    right, shape = draw(40, 64), (40, 64)
    wrong = right.clone()
    wrong[7, 3] = torch.nextafter(wrong[7, 3], torch.tensor(9.0, dtype=torch.float64))
    halves = [Region.box(shape, [range(20), range(64)]), Region.box(shape, [range(20, 40), range(64)])]

    def record(values: torch.Tensor) -> torch.Tensor:
        one, two = (make_sketch("initial_weight", part.take(values), part) for part in halves)
        return add_sketches(one, two)

    assert record(right).shape[1] == WIDTH + 1
    assert float(measure_squares(record(right), record(right)).sum()) == 0.0
    assert int((measure_squares(record(right), record(wrong)) > 0.0).sum()) == 1


@pytest.mark.parametrize("changes", [{}, {"steps": 3, "optimizer": Optimizer(name="sgd", momentum=0.5)}])
def test_a_streamed_run_equals_the_run_of_the_whole_model(tmp_path: Path, changes: dict[str, object]) -> None:
    recipe, whole = make_recipe(**changes), SketchRecorder()
    train(recipe, assemble_single(recipe, CPU, compute="float64"), whole)
    run = StreamedRun(recipe, Numerics("float64"), CPU, tmp_path / "visits")
    run.run()
    assert whole.shapes
    assert run.recorder.shapes == whole.shapes
    assert run.recorder.tensors.keys() == whole.tensors.keys()
    assert max(run.recorder.measure_errors(whole).values()) < 1e-11


def test_an_interrupted_golden_goes_on_after_its_last_visit(tmp_path: Path) -> None:
    recipe, made = make_recipe(), []

    def interrupt(visit: Visit, seconds: float) -> None:
        if visit.what == "total":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_sketched_golden(recipe, tmp_path / "golden", CPU, on_visit=interrupt)
    make_sketched_golden(
        recipe,
        tmp_path / "golden",
        CPU,
        on_visit=lambda visit, seconds: made.append(visit) if seconds else None,
    )
    assert made == [visit for visit in list_visits(3, 2) if visit.step > 0]
    golden = StoredGolden(tmp_path / "golden")
    golden.verify(range(-1, 2))
    assert golden.sketch(1, "gradient", "layers.2.moe.experts.gate") is not None
    assert golden.whole(1, "loss/total").item() > 0.0
    assert not (tmp_path / "golden.visits").exists()


def test_float8_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match="row"):
        make_sketched_golden(make_recipe(float8="rowwise"), tmp_path / "golden", CPU)
