"""From observed dtypes on ranks to findings: the largest wrong part, and dtypes that a layout declares."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from moeverify.report.words.check import word_check
from moeverify.report.words.run import word_finding
from moeverify.results.facts import DtypeFacts, Dtypes, DtypeUse, PatternFacts
from moeverify.results.finding import Finding
from moeverify.results.trace import CollectiveRecord
from moeverify.verification.checks.base import ShownTensors
from moeverify.verification.checks.dtype_watch import Sighting, _find_reductions
from moeverify.verification.checks.precision import Wanted, judge_dtypes, names

NAMES = ("embed.weight", "layers.0.norm.weight", "layers.0.experts.up", "layers.0.experts.down")
Judge = Callable[..., tuple[Finding, ...]]
WANTED = Wanted("bfloat16", "float32")
COORDINATES = {0: {"dp_shard": 0}, 1: {"dp_shard": 1}}


def see(use: DtypeUse, dtype: str, others: dict[str, str] | None = None, how: str = "") -> list[Sighting]:
    return [Sighting(use, name, (others or {}).get(name, dtype), how) for name in NAMES]


@pytest.fixture
def shown(run_ranks: Callable) -> ShownTensors:
    shown: ShownTensors = run_ranks(COORDINATES).shown()
    return shown


@pytest.fixture
def judge(shown: ShownTensors) -> Judge:
    """Return a function that returns the findings as text."""

    def do(*by_rank: Sequence[Sighting], wanted: Wanted = WANTED) -> tuple[Finding, ...]:
        outcome = judge_dtypes(shown, by_rank, wanted)
        assert outcome.result.verdict == ("mismatch" if outcome.findings else "pass")
        return tuple(map(word_finding, outcome.findings))

    return do


def test_what_the_recipe_asks_for_passes(judge: Judge, shown: ShownTensors) -> None:
    rank = [
        *see(DtypeUse.COMPUTES, "bfloat16"),
        *see(DtypeUse.REDUCES, "float32", how="reduce_scatter_tensor"),
        *see(DtypeUse.WEIGHT, "float32"),
        *see(DtypeUse.GRADIENT, "float32"),
        *see(DtypeUse.OPTIMIZER_STATE, "float32", how="exp_avg"),
    ]
    assert judge(rank, rank) == ()
    assert judge_dtypes(shown, [rank, rank], WANTED).result.tensors == 5 * len(NAMES)


@pytest.mark.parametrize(
    ("use", "dtype", "text"),
    [
        (DtypeUse.COMPUTES, "float32", "the model computes with parameters in float32 instead of bfloat16"),
        (
            DtypeUse.REDUCES,
            "bfloat16",
            "the gradients of the model are reduced in bfloat16 instead of float32",
        ),
        (DtypeUse.WEIGHT, "bfloat16", "the parameters of the model are kept in bfloat16 instead of float32"),
        (DtypeUse.GRADIENT, "bfloat16", "the gradients of the model are kept in bfloat16 instead of float32"),
        (DtypeUse.OPTIMIZER_STATE, "bfloat16", "the optimizer state of the model is kept in bfloat16"),
    ],
)
def test_each_use_has_its_dtype(judge: Judge, use: DtypeUse, dtype: str, text: str) -> None:
    [finding] = judge(see(use, dtype), see(use, dtype))
    assert text in finding.cause
    assert (finding.tensor, finding.ranks, finding.error) == ("the model", (0, 1), 1.0)


def test_the_largest_wrong_part_is_named(judge: Judge) -> None:
    wide = {"layers.0.experts.up": "float32", "layers.0.experts.down": "float32"}
    [finding] = judge(see(DtypeUse.COMPUTES, "bfloat16", wide))
    assert finding.tensor == "layers.0.experts"
    assert finding.error == 0.5
    assert finding.facts == DtypeFacts(
        use=DtypeUse.COMPUTES,
        module="layers.0.experts",
        dtype="float32",
        wanted="bfloat16",
        parameters=("layers.0.experts.up", "layers.0.experts.down"),
        num_known=4,
        could_declare=True,
    )
    assert finding.evidence[0] == "2 of 4 parameters: layers.0.experts.up, layers.0.experts.down"
    assert finding.evidence[1].endswith("layout.in_float32: [layers.0.experts]")
    assert finding.place is not None
    assert finding.place.module == "layers.0.experts"


def test_parts_of_two_dtypes_are_told_apart(judge: Judge) -> None:
    found = judge(
        see(DtypeUse.COMPUTES, "bfloat16", {"embed.weight": "float32", "layers.0.norm.weight": "float16"})
    )
    assert {finding.tensor: finding.cause.split()[5] for finding in found} == {
        "embed": "float32",
        "layers.0.norm": "float16",
    }


def test_one_wrong_rank_is_enough(judge: Judge) -> None:
    [finding] = judge(
        see(DtypeUse.GRADIENT, "float32"), see(DtypeUse.GRADIENT, "float32", {"embed.weight": "bfloat16"})
    )
    assert (finding.tensor, finding.rank, finding.ranks) == ("embed", 1, (1,))
    assert finding.coordinates == {"dp_shard": 1}


def test_one_wrong_collective_of_two_is_enough(judge: Judge) -> None:
    scattered = see(DtypeUse.REDUCES, "float32", how="reduce_scatter_tensor over fsdp")
    summed = see(DtypeUse.REDUCES, "bfloat16", how="all_reduce over dp_replicate")
    [finding] = judge([*scattered, *summed])
    assert finding.evidence[1] == "by all_reduce over dp_replicate"
    assert finding.place is not None
    assert finding.place.collectives == ("all_reduce over dp_replicate",)


def test_one_wrong_moment_of_two_is_enough(judge: Judge) -> None:
    [finding] = judge(
        [
            *see(DtypeUse.OPTIMIZER_STATE, "bfloat16", how="exp_avg"),
            *see(DtypeUse.OPTIMIZER_STATE, "float32", how="exp_avg_sq"),
        ]
    )
    assert finding.evidence[1] == "its exp_avg"


def test_parameters_that_were_not_reduced_are_not_blamed(judge: Judge) -> None:
    computed = see(DtypeUse.COMPUTES, "bfloat16")
    [finding] = judge(
        [*computed, Sighting(DtypeUse.REDUCES, "layers.0.norm.weight", "bfloat16", "all_reduce")]
    )
    assert finding.tensor == "layers.0.norm"


def test_declared_modules_compute_as_they_are_kept(judge: Judge) -> None:
    wide = {"layers.0.norm.weight": "float32"}
    declared = Wanted("bfloat16", "float32", ("layers.*.norm",))
    assert judge(see(DtypeUse.COMPUTES, "bfloat16", wide), wanted=declared) == ()
    [finding] = judge(see(DtypeUse.COMPUTES, "bfloat16"), wanted=declared)
    assert finding.cause == "layers.0.norm computes with parameters in bfloat16 instead of float32"


def test_parameters_that_were_not_seen_to_compute_are_counted(shown: ShownTensors) -> None:
    kept = see(DtypeUse.WEIGHT, "float32")
    computed = [seen for seen in see(DtypeUse.COMPUTES, "bfloat16") if seen.parameter != "embed.weight"]
    outcome = judge_dtypes(shown, [[*kept, *computed]], WANTED)
    assert outcome.findings == ()
    assert outcome.result.facts == Dtypes(
        computes="bfloat16", kept="float32", num_parameters=4, num_unseen=1, first_unseen="embed.weight"
    )
    unseen = word_check(outcome.result).unseen
    assert unseen.startswith("1 of 4 parameters, such as embed.weight, were not seen")
    everything = judge_dtypes(shown, [[*kept, *see(DtypeUse.COMPUTES, "bfloat16")]], WANTED)
    assert word_check(everything.result).unseen == ""


def test_a_pattern_without_a_module_is_told(judge: Judge) -> None:
    [finding] = judge(
        see(DtypeUse.COMPUTES, "bfloat16"), wanted=Wanted("bfloat16", "float32", ("layers.*.rooter",))
    )
    assert finding.tensor == "layers.*.rooter"
    assert finding.facts == PatternFacts(pattern="layers.*.rooter")
    assert "matches no module" in finding.cause


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("layers.*.norm", True),
        ("layers.0", True),
        ("*.norm", True),
        ("norm", False),
        ("layers.0.norm.weight", False),  # a parameter, not a module
    ],
)
def test_patterns_name_modules(pattern: str, expected: bool) -> None:
    assert names(pattern, "layers.0.norm.weight") is expected


def issue(op: str, group: str, dtype: str, *shape: int) -> CollectiveRecord:
    return CollectiveRecord(
        number=1,
        op=op,
        group=(0, 1),
        group_name=group,
        sequence=1,
        shape=shape,
        dtype=dtype,
        state="finished",
    )


def test_a_sum_of_activations_is_no_reduction_of_a_parameter_of_its_shape() -> None:
    tokens = issue("all_reduce", "tp", "bfloat16", 32, 16)  # as many tokens as the parameter has rows
    own = issue("all_reduce", "tp", "float32", 32, 16)
    scatter = issue("reduce_scatter_tensor", "dp", "float32", 512)
    records = [tokens, own, scatter]

    def find(partial: set[str]) -> list[CollectiveRecord]:
        return list(_find_reductions(records, {"dp"}, {"tp"}, partial, (32, 16)))

    assert find(set()) == [scatter]
    assert find({"tp"}) == [scatter, own]
