"""The search for the smallest case, with a judge that knows the answer, and the fields that it reduces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from moeverify.cases.schema import Case, ReferenceModel
from moeverify.cases.validation.load import build_case, load_cases
from moeverify.errors import CaseError
from moeverify.verification.controller.reductions import Reducible, Values, format_values, list_reducible
from moeverify.verification.controller.shrink import Shrinking
from moeverify.verification.controller.smaller_cases import examine_place, write_case

pytestmark = pytest.mark.slow

CASE = """\
recipe:
  model:
    {vocab_size: 96, hidden: 32, num_layers: 3, num_heads: 4, num_kv_heads: 4, head_dim: 8, ffn_hidden: 64,
     moe: {num_experts: 16, top_k: 3, expert_hidden: 32, score: sigmoid, num_groups: 4, top_groups: 2}}
  optimizer: {name: sgd, lr: 0.1, clip_norm: 0.2}
  data: {batch: 16, seq_len: 16}
  steps: 3
layout: {dp_shard: 4, tp: 2, ep: 4, sequence_parallel: true, micro_batches: 2}
"""

OWN = """\
recipe:
  model: {factory: "theirs:Net", arguments: {width: 64, kind: deep}, vocab_size: 32}
layout: {dp_shard: 2}
"""

Rule = Callable[[Case], bool]


@pytest.fixture
def reduce(tmp_path: Path) -> Callable[..., tuple[Case, Shrinking]]:
    """Return a function that reduces the case as long as a rule holds."""
    file = tmp_path / "case.yaml"
    file.write_text(CASE)

    def load(values: Values) -> Case | None:
        try:
            return load_cases([file], overrides=format_values(values))[0]
        except CaseError:
            return None

    def do(rule: Rule, is_confirmed: Rule = lambda case: True) -> tuple[Case, Shrinking]:
        def shows(candidates: Sequence[Values]) -> list[bool]:
            cases = [load(each) for each in candidates]
            assert None not in cases, "an invalid case was run"
            return [rule(case) for case in cases if case is not None]

        def list_fields(values: Values) -> Sequence[Reducible] | None:
            case = load(values)
            return None if case is None else list_reducible(case)

        def confirms(values: Values) -> bool:
            case = load(values)
            assert case is not None
            return is_confirmed(case)

        reduction = Shrinking(list_fields, shows, confirms)
        reduction.search()
        smallest = load(reduction.values)
        assert smallest is not None
        return smallest, reduction

    return do


def test_only_what_the_failure_needs_is_left(reduce: Callable[..., tuple[Case, Shrinking]]) -> None:
    smallest, reduction = reduce(lambda case: case.layout.ep >= 2 and case.recipe.steps >= 2)
    assert smallest.layout.world_size == smallest.layout.ep == 2
    assert (smallest.recipe.steps, smallest.recipe.data.batch, smallest.recipe.data.seq_len) == (2, 2, 1)
    model = smallest.recipe.model
    assert isinstance(model, ReferenceModel)
    assert (model.num_layers, model.num_heads, model.hidden) == (1, 1, 8)
    assert model.moe is not None
    assert (model.moe.num_experts, model.moe.top_k, model.moe.num_groups) == (2, 1, 1)
    assert smallest.recipe.optimizer.clip_norm is None
    assert reduction.num_tried < 35  # 36 if each field is tried alone


def test_a_case_that_is_not_confirmed_is_not_kept(reduce: Callable[..., tuple[Case, Shrinking]]) -> None:
    smallest, reduction = reduce(
        lambda case: case.layout.ep >= 2, lambda case: case.recipe.steps + case.recipe.data.batch >= 10
    )
    assert smallest.recipe.steps + smallest.recipe.data.batch >= 10
    assert smallest.layout.world_size == 2
    assert isinstance(smallest.recipe.model, ReferenceModel)
    assert smallest.recipe.model.num_layers == 1
    assert reduction.num_tried < 50  # 106 if each field is tried alone


def test_fields_that_need_each_other_shrink_together(
    reduce: Callable[..., tuple[Case, Shrinking]],
) -> None:
    smallest, _ = reduce(lambda case: case.layout.tp == 2)
    assert smallest.layout.world_size == 2
    assert not smallest.layout.sequence_parallel
    assert isinstance(smallest.recipe.model, ReferenceModel)
    assert smallest.recipe.model.moe is None  # a whole section is left out, with its fields


def test_a_section_that_the_failure_needs_stays(reduce: Callable[..., tuple[Case, Shrinking]]) -> None:
    def rule(case: Case) -> bool:
        moe = case.recipe.model.moe
        return case.layout.tp == 2 and moe is not None and moe.top_k == 3

    smallest, _ = reduce(rule)
    moe = smallest.recipe.model.moe
    assert moe is not None
    assert (moe.num_experts, moe.top_k) == (4, 3)
    assert smallest.layout.world_size == 2


def test_a_failure_that_needs_little_is_found_by_reducing_all_fields_together(
    reduce: Callable[..., tuple[Case, Shrinking]],
) -> None:
    smallest, reduction = reduce(lambda case: case.layout.dp_shard > 1)
    assert smallest.layout.world_size == 2
    assert reduction.num_tried < 25  # 30 if each field is tried alone


def test_a_failure_that_needs_everything_leaves_the_case(
    reduce: Callable[..., tuple[Case, Shrinking]],
) -> None:
    smallest, reduction = reduce(lambda case: False)
    assert not reduction.values
    assert smallest.layout.world_size == 8


def test_an_interrupted_search_keeps_the_best_so_far(tmp_path: Path) -> None:
    case = build_case({"name": "c", "recipe": load_recipe(tmp_path), "layout": {"dp_shard": 2}})
    asked = 0

    def shows(candidates: Sequence[Values]) -> list[bool]:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise KeyboardInterrupt
        return [False for _ in candidates]  # all fields together; each alone is next

    reduction = Shrinking(lambda values: list_reducible(case), shows)
    with pytest.raises(KeyboardInterrupt):
        reduction.search()
    assert asked == 2
    assert write_case(case, "c", [])  # the values before the interrupted round are those of a whole case
    assert not reduction.values


def load_recipe(folder: Path) -> dict[str, object]:
    file = folder / "own.yaml"
    (folder / "theirs.py").write_text("class Net:\n    def __init__(self, width=8, layers=4): ...\n")
    file.write_text(OWN)
    return load_cases([file])[0].recipe.model_dump(mode="json", exclude_defaults=True)


def test_arguments_and_defaults_of_a_factory_are_reducible(tmp_path: Path) -> None:
    load_recipe(tmp_path)
    case = load_cases([tmp_path / "own.yaml"])[0]
    found = {each.path: each.smaller for each in list_reducible(case, [str(tmp_path)])}
    assert found["recipe.model.arguments.width"] == (8, 16, 32)
    assert found["recipe.model.arguments.layers"] == (1, 2)
    assert not any("kind" in path or "factory" in path for path in found)


def test_the_written_file_is_the_case(tmp_path: Path) -> None:
    (tmp_path / "case.yaml").write_text(CASE)
    before = load_cases([tmp_path / "case.yaml"], overrides=["layout.ep=2"])[0]
    (tmp_path / "small.yaml").write_text(write_case(before, "small", ["one line"]))
    after = load_cases([tmp_path / "small.yaml"])[0]
    assert after.name == "small"
    assert (after.layout, after.checks) == (before.layout, before.checks)
    assert after.recipe.fingerprint() == before.recipe.fingerprint()


def test_a_place_from_which_functions_are_not_found_is_refused(tmp_path: Path) -> None:
    load_recipe(tmp_path)
    case = load_cases([tmp_path / "own.yaml"])[0]
    examine_place(case, tmp_path / "small.yaml")
    with pytest.raises(CaseError, match="there is no module `theirs`"):
        examine_place(case, tmp_path / "elsewhere" / "small.yaml")
