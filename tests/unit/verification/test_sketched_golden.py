"""Sketches add up over shards and find differences; a streamed run equals the run of the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moeverify.cases.schema import Data, MoE, Optimizer, Recipe, ReferenceModel, Tolerance
from moeverify.cases.validation.load import build_case
from moeverify.cases.validation.sketch import find_sketch_problems
from moeverify.parallel.regions.region import Region
from moeverify.parallel.regions.sketch import WIDTH, BlockGrid, estimate_squares, hash_blocks, sketch
from moeverify.results.checks import CheckName
from moeverify.results.facts import BySketch
from moeverify.train.assemble import assemble_single
from moeverify.train.loop import train
from moeverify.verification.checks.base import ComparedTensors
from moeverify.verification.checks.bounds import Bounds
from moeverify.verification.checks.golden_tensors import CHECKS
from moeverify.verification.compare.assembled import Assembled, assemble
from moeverify.verification.golden.sketched import SketchRecorder, add_sketches, make_sketch, measure_squares
from moeverify.verification.golden.store import StoredGolden
from moeverify.verification.golden_run.plan import plan_golden
from moeverify.verification.golden_run.sketched import make_sketched_golden
from moeverify.verification.golden_run.streamed import StreamedRun, StreamVisit, list_visits
from moeverify.verification.golden_run.streamed_unit import Numerics
from moeverify.verification.worker.by_sketch import SketchComparison, estimate_entries

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
        assert torch.equal(
            sum(BlockGrid.of(shape).count_in(part) for part in parts), BlockGrid.of(shape).count()
        )


@pytest.mark.slow  # on a CPU the kernel runs in Triton's interpreter
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((130,), torch.float64),
        ((100, 37), torch.float64),
        ((2, 3, 4, 6), torch.float64),
        ((34, 10), torch.bfloat16),
    ],
)
def test_the_kernel_sketches_a_shard_as_torch_does(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    values = draw(*shape).to(dtype)
    values.view(-1)[[0, -1]] = torch.tensor([torch.nan, torch.inf], dtype=dtype)
    size = values.numel()
    halves = [*map(range, shape[:-1]), range(shape[-1] // 3, shape[-1])]
    odd = [tuple(range(0, shape[0], 2)), *map(range, shape[1:])]
    regions = [Region.run(shape, size // 5, size - 2), Region.box(shape, halves)]
    for region in [*regions, Region.box(shape, odd)] if len(shape) > 1 else regions:
        expected = sketch(region.take(values), region)
        with monkeypatch.context() as patch:
            patch.setattr("moeverify.parallel.regions.sketch.can_compile", lambda device: True)
            found = sketch(region.take(values).to(device), region).cpu()
        rounding = 1e-12 if dtype is torch.float64 else 1e-6
        torch.testing.assert_close(found, expected, atol=rounding * size, rtol=rounding)


def test_an_error_is_found_in_its_block_with_its_size() -> None:
    right, shape = draw(8, 64, 32), (8, 64, 32)
    wrong = right.clone()
    wrong[5] *= 1.25
    expected, actual = (sketch(each, Region.whole(shape)) for each in (right, wrong))
    squares = estimate_squares(expected, actual)
    places = {
        BlockGrid.of(shape).locate(block)[0] for block in (squares > 1e-12).nonzero().reshape(-1).tolist()
    }
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

    def interrupt(visit: StreamVisit, seconds: float) -> None:
        if visit.stage == "total":
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


def test_cases_for_which_sketches_do_not_suffice_are_refused() -> None:
    def find(**checks: object) -> list[str]:
        recipe = {"model": {"preset": "stress"}, "steps": 2}
        case = build_case({"name": "c", "recipe": recipe, "checks": checks})
        return [problem.path for problem in find_sketch_problems(case)]

    assert find() == []
    assert find(steps="forced", also=["activations"]) == ["checks.steps", "checks.also"]


SHAPE = (8, 64, 32)
HALVES = [
    Region.box(SHAPE, [range(4), range(64), range(32)]),
    Region.box(SHAPE, [range(4, 8), *map(range, SHAPE[1:])]),
]


class Golden:
    """The sketch of one gradient."""

    def __init__(self, values: torch.Tensor) -> None:
        self.sketches = {"gradient/w": SHAPE}
        self._stored = make_sketch("gradient", values, Region.whole(SHAPE))

    def sketch(self, step: int, kind: str, name: str) -> torch.Tensor:
        return self._stored

    def read(self, *place: object) -> None:
        return None


def estimate(golden: Golden, *shards: tuple[torch.Tensor, Region]) -> Assembled:
    """Return the gradient that ranks with one shard each have shown."""
    by_rank = []
    for values, region in shards:
        comparison = SketchComparison(golden)
        comparison.observe(0, "gradient", "w", region.take(values), region)
        by_rank.append(list(comparison.entries()))
    return assemble(estimate_entries(by_rank, golden), {"gradient": 0})[0, "gradient", "w"]


def test_shards_of_ranks_add_up_and_the_wrong_one_is_named_with_its_block() -> None:
    right = draw(*SHAPE)
    wrong = right.clone()
    wrong[5, :32] *= 2.0
    golden = Golden(right)
    clean = estimate(golden, *((right, half) for half in HALVES))
    assert clean.is_estimated
    assert clean.difference.count == right.numel()
    assert clean.difference.relative_error < 1e-14
    tensor = estimate(golden, *((wrong, half) for half in HALVES))
    true = float((wrong - right).norm() / right.norm())
    assert tensor.difference.relative_error == pytest.approx(true, rel=0.5)
    rank, entry = tensor.worst_shard()
    assert (rank, tensor.differing_ranks()) == (1, (1,))
    assert entry.block[0] == range(5, 6)
    assert entry.block[1].stop <= 32


def test_shards_that_share_blocks_share_their_errors() -> None:
    right = draw(*SHAPE)
    wrong = right * 1.1
    golden = Golden(right)
    zigzag = [Region.box(SHAPE, [range(8), range(64), tuple(range(at, 32, 2))]) for at in range(2)]
    shared = estimate(golden, *((wrong, part) for part in zigzag)).difference
    alone = estimate(golden, (wrong, Region.whole(SHAPE))).difference
    for total in ("count", "sum_expected2", "sum_actual2", "sum_error2"):
        assert getattr(shared, total) == pytest.approx(getattr(alone, total), rel=1e-12), total


def test_every_replica_is_judged() -> None:
    right = draw(*SHAPE)
    wrong = right.clone()
    wrong[2] *= 1.5
    whole = Region.whole(SHAPE)
    tensor = estimate(Golden(right), (right, whole), (right, whole), (wrong, whole))
    assert tensor.differing_ranks() == (2,)
    assert tensor.difference.relative_error == pytest.approx(0.5 * 8**-0.5, rel=0.5)


def test_elements_that_are_not_finite_are_counted() -> None:
    wrong = draw(*SHAPE)
    wrong[1, 2, 3] = float("nan")
    tensor = estimate(Golden(draw(*SHAPE)), *((wrong, half) for half in HALVES))
    assert tensor.difference.num_nonfinite == 1.0
    assert tensor.worst_shard()[0] == 0


@pytest.mark.parametrize(
    ("bound", "verdict", "num_open", "limit"),
    [(1.0, "pass", 0, 1.4), (0.1, "pass", 1, float("inf")), (0.01, "mismatch", 0, 0.014)],
)
def test_an_error_near_its_bound_is_left_open(
    bound: float, verdict: str, num_open: int, limit: float
) -> None:
    right = draw(*SHAPE)
    tensor = estimate(Golden(right), (right * 1.15, Region.whole(SHAPE)))
    bounds = Bounds(Tolerance(kind="fixed", rtol=bound, atol=0.0), "float64", {})
    check = next(check for check in CHECKS if check.name == CheckName.GRADIENT)
    outcome = check.compare(ComparedTensors({}, {tensor.key: tensor}, bounds))
    assert outcome is not None
    assert outcome.result.verdict == verdict
    assert outcome.result.facts == BySketch(num_projections=8, num_tensors=1, num_open=num_open)
    assert outcome.limits[tensor.key] == pytest.approx(limit)


def test_memory_of_a_golden_does_not_grow_with_layers_and_operations_do() -> None:
    plans = []
    for depth in (2, 4, 8):
        model = make_recipe().model.model_copy(update={"num_layers": depth, "num_dense_layers": 0})
        plans.append(plan_golden(make_recipe(model=model), CPU))
    assert len({plan.device_bytes for plan in plans}) == 1
    one, two, four = plans
    for count in ("num_parameters", "operations", "record_bytes"):
        first, second, third = (getattr(plan, count) for plan in (one, two, four))
        assert third - second == pytest.approx(2.0 * (second - first)), count
