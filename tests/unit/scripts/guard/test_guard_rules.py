"""The rules of the judge, on records as ranks leave them: findings, and cases that they must not report."""

from __future__ import annotations

import math
from typing import Any

import pytest

from moeverify.results.guard import DriftFacts, OwnNormFacts
from moeverify.scripts.guard.drift import find_cause
from moeverify.scripts.guard.lines import ClipLine, GroupLine, RankHeader, StepRecord, SumLine, TensorLine
from moeverify.scripts.guard.norms import NormRule
from moeverify.scripts.guard.replicas import ReplicaRule, find_replicas
from moeverify.scripts.guard.tokens import TokenRule
from moeverify.scripts.record.lines import Options
from moeverify.train.calls.call import LoopCall

WHOLE = TensorLine(name="dense", shape=(4, 4), region="0:4,0:4", is_whole=True, eps=2.0**-23)
PART = TensorLine(name="experts.up", shape=(2, 4, 4), region="0:2,0:4,0:4", is_whole=True, eps=2.0**-23)


def make_headers(num_ranks: int = 2, data_ranks: tuple[int, ...] = (0, 1)) -> dict[int, RankHeader]:
    return {
        rank: RankHeader(rank=rank, world_size=num_ranks, tensors=(WHOLE, PART), data_ranks=data_ranks)
        for rank in range(num_ranks)
    }


def make_records(step: int = 0, **changes: list[object]) -> dict[int, StepRecord]:
    """Return records of two ranks: a dense tensor that both have, and experts of each rank."""
    common: dict[str, list[object]] = {
        "began": [(1, 2), (1, 3)],
        "ended": [(4, 5), (4, 6)],
        "gradients": [(7, 8), (7, 9)],
        "projections": [((1.0,) * 4, (1.0,) * 4)] * 2,
        "norms": [(1.0, 1.0)] * 2,
        "squares": [(1.0, 2.0), (1.0, 3.0)],
        "before": [(1.0, 2.0), (1.0, 3.0)],
        **changes,
    }
    return {
        rank: StepRecord.model_validate(
            {"step": step, "rank": rank, **{name: values[rank] for name, values in common.items()}}
        )
        for rank in range(2)
    }


def make_clip(
    coefficient: float, dense: float = 1.0, first: float = 2.0, second: float = 3.0
) -> dict[str, list[object]]:
    """Return gradients with these squares, clipped by the script's own clip."""
    before = [(dense, first), (dense, second)]
    squares = [tuple(value * coefficient**2 for value in row) for row in before]
    return {"before": list(before), "squares": list(squares)}


def make_norm_rule() -> NormRule:
    return NormRule(*find_replicas(make_headers(), make_records()), 2)


STEPS = ((1.0, 2.0, 3.0), (2.0, 1.0, 3.0), (0.5, 4.0, 1.0), (3.0, 0.5, 0.5))


@pytest.mark.parametrize(
    ("times_dense", "times_experts", "part", "times"),
    [
        (2.0, 1.0, "replicated", 2.0),
        (0.0, 1.0, "replicated", 0.0),
        (1.0, 2.0, "unknown", 1.0),
        (1.0, 0.0, "sharded", 0.0),
    ],
)
def test_a_norm_that_counts_a_group_otherwise_is_named_from_the_steps(
    times_dense: float, times_experts: float, part: str, times: float
) -> None:
    rule = make_norm_rule()
    found = []
    for step, (dense, first, second) in enumerate(STEPS):
        norm = math.sqrt(times_dense * dense + times_experts * (first + second))
        found += rule.find(make_records(step, **make_clip(0.1 / norm, dense, first, second)))
    (finding,) = found
    assert isinstance(finding.facts, OwnNormFacts)
    assert (finding.facts.error.part, finding.facts.error.times) == (part, times)


def test_the_right_norm_is_silent_also_with_a_limit_that_changes() -> None:
    rule, changing = make_norm_rule(), make_norm_rule()
    for step, (dense, first, second) in enumerate(STEPS):
        norm = math.sqrt(dense + first + second)
        assert not rule.find(make_records(step, **make_clip(0.1 / norm, dense, first, second)))
        limit = 0.1 * (1 + step)
        assert not changing.find(make_records(step, **make_clip(limit / norm, dense, first, second)))


def test_ranks_that_clip_by_their_own_part_differ_in_their_coefficients() -> None:
    rule = make_norm_rule()
    found = []
    for step in range(2):
        records = make_records(step)
        for rank, part in ((0, 2.0), (1, 3.0)):
            coefficient = 0.1 / math.sqrt(1.0 + part)
            squares = tuple(value * coefficient**2 for value in (1.0, part))
            records[rank] = records[rank].model_copy(update={"before": (1.0, part), "squares": squares})
        found += rule.find(records)
    (finding,) = found
    assert isinstance(finding.facts, OwnNormFacts)
    assert (finding.facts.source, finding.facts.error.part) == ("ranks", "local")


@pytest.mark.parametrize(
    ("norm", "part"), [(math.sqrt(6.0), ""), (math.sqrt(3.0), "local"), (2.0, "unknown")]
)
def test_the_norm_that_torchs_clip_returns_is_held_against_the_gradients(norm: float, part: str) -> None:
    clips = [(ClipLine(norm=norm, max_norm=0.1, squares={0: 1.0, 1: square}),) for square in (2.0, 3.0)]
    found = make_norm_rule().find(make_records(clips=list(clips)))
    parts = [finding.facts.error.part for finding in found if isinstance(finding.facts, OwnNormFacts)]
    assert parts == ([part] if part else [])


def find_drift(**changes: list[object]) -> list[DriftFacts]:
    rule = ReplicaRule(*find_replicas(make_headers(), make_records(**changes)))
    found = [*rule.find(make_records(0, **changes)), *rule.find(make_records(1, **changes))]
    return [finding.facts for finding in found if isinstance(finding.facts, DriftFacts)]


APART: list[object] = [((1.0,) * 4, (1.0,) * 4), ((1.5,) * 4, (1.0,) * 4)]


def test_parts_of_a_tensor_may_differ_and_replicas_may_not() -> None:
    assert not find_drift()
    apart: dict[str, list[object]] = {"ended": [(4, 5), (40, 6)], "projections": APART}
    (facts,) = find_drift(gradients=[(7, 8), (70, 9)], before=[(1.0, 2.0), (1.1, 3.0)], **apart)
    assert (facts.names, facts.since, facts.gradients) == (("dense",), "update", "differ")
    (facts,) = find_drift(gradients=[(7, 8), (70, 9)], **apart)
    assert facts.gradients == "clipped apart"
    (facts,) = find_drift(ended=[(4, 5), (40, 6)], projections=APART)
    assert facts.gradients == "equal"


@pytest.mark.parametrize(
    ("changes", "kind", "place"),
    [
        ({"options": [0.1, 0.2]}, "option", "lr"),
        ({"stepped": [(4, 5), (4, 6)]}, "write", (1,)),
        ({"gradients": [(7, 8), (70, 9)], "outputs": [1.0, 1.0]}, "backward", ""),
        ({"gradients": [(7, 8), (70, 9)], "outputs": [1.0, 1.1]}, "local", "layer"),
        (
            {"gradients": [(7, 8), (70, 9)], "outputs": [1.0, 1.1], "losses": [(3.0,), (4.0,)]},
            "forward",
            "layer",
        ),
    ],
)
def test_the_cause_of_a_drift_is_named(changes: dict[str, list[Any]], kind: str, place: object) -> None:
    own: dict[str, list[object]] = {
        "ended": [(4, 5), (40, 6)],
        "projections": APART,
        "before": [(1.0, 2.0), (1.1, 3.0)],
        "rows": [((1, 2),)] * 2,
        "losses": [(3.0,)] * 2,
        "exchanged": [((0, 1),)] * 2,
        **changes,
    }
    if "options" in own:
        common = {"step": 0, "optimizer": "SGD", "number": 0, "names": ("layer.dense",)}
        own["options"] = [
            (Options.model_validate({**common, "options": {"lr": lr}}),) for lr in changes["options"]
        ]
    if "outputs" in own:
        # The outputs of a module whose weights are parts may differ.
        own["outputs"] = [
            (("layer.experts", float(n)), ("layer", value)) for n, value in enumerate(changes["outputs"])
        ]
    members = {0: 0, 1: 0}
    gradients = "differ" if "gradients" in own else "equal"
    cause = find_cause("layer.dense", members, make_records(**own), gradients, {"layer"})
    assert cause is not None
    assert cause.kind == kind
    assert place in (cause.option, cause.ranks, cause.module)


@pytest.mark.parametrize(
    ("own", "right", "values", "kind"),
    [
        ("norm", {"stem"}, (1.0, 2.0), "local"),
        ("norm", {"stem"}, (1.0, 1.0), "parts"),  # parts that began as copies
        ("up", set(), (1.0, 1.0), "parts"),  # beside parts with other values
        ("norm", set(), (1.0, 1.0), "backward"),
        ("norm", set(), (1.0, 2.0), "local"),  # earlier modules are wrong too, through their gradients
        ("stem", set(), (1.0, 2.0), "backward"),
    ],
)
def test_ranks_with_equal_losses_are_told_apart_by_their_modules(
    own: str, right: set[str], values: tuple[float, float], kind: str
) -> None:
    outputs: list[object] = [(("stem", 1.0), ("norm", value)) for value in values]
    records = make_records(rows=[((1, 2),)] * 2, losses=[(3.0,)] * 2, outputs=outputs)
    shared = {"stem", "norm"}
    cause = find_cause(f"{own}.bias", {0: 0, 1: 0}, records, "differ", shared, right=right, parts={"up"})
    assert cause is not None
    assert cause.kind == kind
    # Ranks that hold no parts and exchange nothing are data-parallel.
    assert find_cause(f"{own}.bias", {0: 0, 1: 0}, records, "differ", shared, right=right) is None


@pytest.mark.parametrize(
    ("stepped", "groups", "source"),
    [
        ((4, 5), GroupLine(name="0", ranks=(0, 1), number=1, hash=1, largest=100, largest_sum=1), 0),
        ((4, 5), GroupLine(name="0", ranks=(0, 1), number=1, hash=1, largest_sum=100), None),  # of gradients
        ((4, 5), GroupLine(name="0", ranks=(0, 1), number=1, hash=1, is_message=True), None),
        ((3, 5), GroupLine(name="0", ranks=(0, 1), number=1, hash=1), None),  # an average
        ((4, 0), GroupLine(name="0", ranks=(0, 1), number=1, hash=1), None),  # each rank updates its own part
        ((4, 4), GroupLine(name="0", ranks=(0, 1), number=1, hash=1), None),
    ],
)
def test_a_broadcast_after_the_step_replaces_updates_of_other_ranks(
    stepped: tuple[int, int], groups: GroupLine, source: int | None
) -> None:
    changes: dict[str, list[object]] = {
        "gradients": [(7, 8), (70, 9)],
        "before": [(1.0, 2.0), (1.1, 3.0)],
        "stepped": [(each, 5) for each in stepped],
        "groups": [(groups,)] * 2,
    }
    found = [facts.cause for facts in find_drift(**changes)]
    expected = [] if source is None else [("overwrite", (source,))]
    assert [(cause.kind, cause.ranks) for cause in found if cause is not None] == expected


def test_ranks_that_add_up_activations_must_have_the_same_rows() -> None:
    def find(rows: int, data_ranks: tuple[int, ...], positions: int = 8) -> str:
        sum_line = SumLine(ranks=(0, 1), site="a.py:1", hash=1, num_positions=positions)
        changes: dict[str, list[object]] = {
            "ended": [(4, 5), (40, 6)],
            "gradients": [(7, 8), (70, 9)],
            "projections": APART,
            "before": [(1.0, 2.0), (1.1, 3.0)],
            "exchanged": [((0, 1),)] * 2,
            "rows": [((1,),), ((rows,),)],
            "sums": [(sum_line,)] * 2,
        }
        headers = {
            rank: header.model_copy(update={"num_positions": 8})
            for rank, header in make_headers(data_ranks=data_ranks).items()
        }
        rule = ReplicaRule(*find_replicas(headers, make_records(**changes)), headers)
        (finding,) = rule.find(make_records(**changes))
        assert isinstance(finding.facts, DriftFacts)
        return finding.facts.cause.kind if finding.facts.cause else ""

    assert find(2, ()) == "rows"
    assert find(1, ()) != "rows"
    assert find(2, (0, 1)) != "rows"  # batch norm over data-parallel ranks
    assert find(2, (), 16) != "rows"  # tokens of both ranks, gathered for experts


def test_a_difference_by_the_norm_follows_from_gradients_that_differ() -> None:
    apart: dict[str, list[object]] = {
        "began": [(1, 2), (1, 2)],
        "ended": [(4, 5), (40, 50)],
        "gradients": [(7, 8), (70, 80)],
        "projections": [((1.0,) * 4, (1.0,) * 4), ((2.0,) * 4, (2.0,) * 4)],
        "before": [(1.0, 2.0), (1.0, 3.0)],
    }
    assert [facts.gradients for facts in find_drift(**apart)] == ["differ"]
    apart["before"] = [(1.0, 2.0), (1.0, 2.0)]
    assert [facts.gradients for facts in find_drift(**apart)] == ["clipped apart"] * 2


def test_a_scheduler_that_one_rank_alone_steps_is_the_cause_of_another_learning_rate() -> None:
    common = {"step": 0, "optimizer": "SGD", "number": 0, "names": ("dense",)}
    options = [(Options.model_validate({**common, "options": {"lr": lr}}),) for lr in (0.1, 0.2)]
    calls = [(LoopCall(step=0, name="scheduler step", site="train.py:7"),), ()]
    records = make_records(options=options, calls=calls)
    cause = find_cause("dense", {0: 0, 1: 0}, records, "equal", {"layer"})
    assert cause is not None
    assert (cause.kind, cause.counts, cause.site) == ("schedule", (1, 0), "train.py:7")


def test_replicas_that_never_were_equal_are_known_by_their_equal_gradients() -> None:
    (facts,) = find_drift(began=[(1, 2), (10, 3)], ended=[(4, 5), (40, 6)], projections=APART)
    assert (facts.names, facts.since) == (("dense",), "start")


def test_rounding_that_stays_is_no_drift() -> None:
    near: list[object] = [((1.0,) * 4, (1.0,) * 4), ((1.0 + 1e-7,) * 4, (1.0,) * 4)]
    assert not find_drift(ended=[(4, 5), (40, 6)], projections=near)


def find_tokens(
    rows: list[object], headers: dict[int, RankHeader], num_steps: int = 2, **changes: list[object]
) -> list[str]:
    rule = TokenRule(headers)
    return [
        finding.check
        for step in range(num_steps)
        for finding in rule.find(make_records(step, rows=rows, **changes))
    ]


def test_data_parallel_ranks_with_the_same_rows_are_found_when_it_happens_twice() -> None:
    same: list[object] = [((1, 2), (3, 4))] * 2
    assert find_tokens(same, make_headers()) == ["tokens"]
    assert not find_tokens(same, make_headers(), num_steps=1)
    assert not find_tokens([((1, 2), (3, 4)), ((5, 6), (7, 4))], make_headers())


def test_ranks_that_do_the_same_are_found_unless_they_exchange_something() -> None:
    same: list[object] = [((1, 2),)] * 2
    alike: dict[str, list[object]] = {"ended": [(4, 5)] * 2}
    headers = make_headers(data_ranks=())
    assert find_tokens(same, headers, **alike) == ["same work"]
    line = GroupLine(name="0", ranks=(0, 1), number=3, hash=1, largest=1000)
    assert not find_tokens(same, headers, groups=[(line,)] * 2, **alike)
    log = line.model_copy(update={"largest": 1})
    assert find_tokens(same, headers, groups=[(log,)] * 2, **alike) == ["same work"]
