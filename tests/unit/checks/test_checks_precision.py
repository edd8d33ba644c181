"""From the dtypes that ranks saw to findings: the largest part that is wrong, and what a layout declares."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from moeverify.checks.precision import Seen, Use, Wanted, judge_precision, names
from moeverify.results.finding import Finding

NAMES = ("embed.weight", "layers.0.norm.weight", "layers.0.experts.up", "layers.0.experts.down")
WANTED = Wanted("bfloat16", "float32")
COORDINATES = {0: {"dp_shard": 0}, 1: {"dp_shard": 1}}


def see(use: Use, dtype: str, others: dict[str, str] | None = None, how: str = "") -> list[Seen]:
    return [Seen(use, name, (others or {}).get(name, dtype), how) for name in NAMES]


def judge(*by_rank: Sequence[Seen], wanted: Wanted = WANTED) -> tuple[Finding, ...]:
    judgement = judge_precision(by_rank, wanted, COORDINATES)
    assert judgement.checks[0].verdict == ("mismatch" if judgement.findings else "pass")
    return judgement.findings


def test_what_the_recipe_asks_for_passes() -> None:
    rank = [
        *see("computes", "bfloat16"),
        *see("reduces", "float32", how="reduce_scatter_tensor"),
        *see("weight", "float32"),
        *see("gradient", "float32"),
        *see("optimizer state", "float32", how="exp_avg"),
    ]
    assert judge(rank, rank) == ()
    assert judge_precision([rank, rank], WANTED, COORDINATES).checks[0].tensors == 5 * len(NAMES)


@pytest.mark.parametrize(
    ("use", "dtype", "text"),
    [
        ("computes", "float32", "the model computes with parameters in float32 instead of bfloat16"),
        ("reduces", "bfloat16", "the gradients of the model are reduced in bfloat16 instead of float32"),
        ("weight", "bfloat16", "the parameters of the model are kept in bfloat16 instead of float32"),
        ("gradient", "bfloat16", "the gradients of the model are kept in bfloat16 instead of float32"),
        ("optimizer state", "bfloat16", "the optimizer state of the model is kept in bfloat16"),
    ],
)
def test_each_use_has_its_dtype(use: Use, dtype: str, text: str) -> None:
    [finding] = judge(see(use, dtype), see(use, dtype))
    assert text in finding.cause
    assert (finding.tensor, finding.ranks, finding.error) == ("the model", (0, 1), 1.0)


def test_the_largest_wrong_part_is_named() -> None:
    wide = {"layers.0.experts.up": "float32", "layers.0.experts.down": "float32"}
    [finding] = judge(see("computes", "bfloat16", wide))
    assert finding.tensor == "layers.0.experts"
    assert finding.error == 0.5
    assert finding.evidence[0] == "2 of 4 parameters: layers.0.experts.up, layers.0.experts.down"
    assert finding.evidence[1].endswith("layout.in_float32: [layers.0.experts]")
    assert finding.place is not None
    assert finding.place.module == "layers.0.experts"


def test_parts_of_two_dtypes_are_told_apart() -> None:
    found = judge(see("computes", "bfloat16", {"embed.weight": "float32", "layers.0.norm.weight": "float16"}))
    assert {finding.tensor: finding.cause.split()[5] for finding in found} == {
        "embed": "float32",
        "layers.0.norm": "float16",
    }


def test_one_wrong_rank_is_enough() -> None:
    [finding] = judge(see("gradient", "float32"), see("gradient", "float32", {"embed.weight": "bfloat16"}))
    assert (finding.tensor, finding.rank, finding.ranks) == ("embed", 1, (1,))
    assert finding.coordinates == {"dp_shard": 1}


def test_one_wrong_collective_of_two_is_enough() -> None:
    scattered = see("reduces", "float32", how="reduce_scatter_tensor over fsdp")
    summed = see("reduces", "bfloat16", how="all_reduce over dp_replicate")
    [finding] = judge([*scattered, *summed])
    assert finding.evidence[1] == "by all_reduce over dp_replicate"
    assert finding.place is not None
    assert finding.place.collectives == ("all_reduce over dp_replicate",)


def test_one_wrong_moment_of_two_is_enough() -> None:
    [finding] = judge(
        [
            *see("optimizer state", "bfloat16", how="exp_avg"),
            *see("optimizer state", "float32", how="exp_avg_sq"),
        ]
    )
    assert finding.evidence[1] == "its exp_avg"


def test_parameters_that_were_not_reduced_are_not_blamed() -> None:
    computed = see("computes", "bfloat16")
    [finding] = judge([*computed, Seen("reduces", "layers.0.norm.weight", "bfloat16", "all_reduce")])
    assert finding.tensor == "layers.0.norm"


def test_declared_modules_compute_as_they_are_kept() -> None:
    wide = {"layers.0.norm.weight": "float32"}
    declared = Wanted("bfloat16", "float32", ("layers.*.norm",))
    assert judge(see("computes", "bfloat16", wide), wanted=declared) == ()
    [finding] = judge(see("computes", "bfloat16"), wanted=declared)
    assert finding.cause == "layers.0.norm computes with parameters in bfloat16 instead of float32"


def test_parameters_that_were_not_seen_to_compute_are_counted() -> None:
    kept = see("weight", "float32")
    computed = [seen for seen in see("computes", "bfloat16") if seen.parameter != "embed.weight"]
    judgement = judge_precision([[*kept, *computed]], WANTED, COORDINATES)
    assert judgement.findings == ()
    assert judgement.checks[0].unseen.startswith("1 of 4 parameters, such as embed.weight, were not seen")
    assert (
        judge_precision([[*kept, *see("computes", "bfloat16")]], WANTED, COORDINATES).checks[0].unseen == ""
    )


def test_a_pattern_without_a_module_is_told() -> None:
    [finding] = judge(see("computes", "bfloat16"), wanted=Wanted("bfloat16", "float32", ("layers.*.rooter",)))
    assert finding.tensor == "layers.*.rooter"
    assert "names no module" in finding.cause


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("layers.*.norm", True),
        ("layers.0", True),
        ("*.norm", True),
        ("norm", False),
        ("layers.0.norm.weight", False),  # a parameter, and no module
    ],
)
def test_patterns_name_modules(pattern: str, expected: bool) -> None:
    assert names(pattern, "layers.0.norm.weight") is expected
