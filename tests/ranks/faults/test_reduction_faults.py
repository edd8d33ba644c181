"""Collectives of real ranks that do not sum are reported with their lines."""

import os
from pathlib import Path

import pytest

from moeverify.faults.setting import make_case
from moeverify.results.checks import CheckName, Kind
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.controller.run import run_cases

SMALL = {"model": {"num_layers": 2}, "recipe": {"steps": 1}}
DENSE = make_case("dense", preset="tiny-gpt", **SMALL, tp=2, sequence_parallel=True)
EXPERTS = make_case("experts", **SMALL, dp_replicate=2, data_parallel="ddp", ep=2)
CASES = {"take_largest": DENSE, "copy_first": DENSE, "count_again": EXPERTS, "cut_tokens": EXPERTS}
SEARCHED = ("take_largest", "copy_first")


@pytest.fixture(scope="module")
def heads(known_goldens):
    """Return the first finding of each fault. The search finds lines: it runs for `SEARCHED` alone."""
    patch = pytest.MonkeyPatch()
    patch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    )
    found = {}
    try:
        for is_searched in (True, False):
            names = [name for name in CASES if (name in SEARCHED) == is_searched]
            options = RunOptions(
                device="cpu",
                cache_folder=known_goldens,
                golden_folder=Path("no", "goldens"),
                require_goldens=False,
                case_faults={name: f"reduction_programs:{name}" for name in names},
                explain_seconds=60.0 if is_searched else 0.0,
            )
            cases = [CASES[name].model_copy(update={"name": name}) for name in names]
            for result in run_cases(cases, options, lambda event: None).cases:
                found[result.name] = next(each for each in result.findings if not each.follows)
    finally:
        patch.undo()
    return found


@pytest.mark.parametrize("name", SEARCHED)
def test_the_lines_of_a_completion_that_is_no_sum_are_shown(heads, name):
    head = heads[name]
    assert head.check == CheckName.GRADIENT
    assert "reduction_programs.py" in head.model_dump_json()


def test_counts_that_are_reduced_twice_are_found(heads):
    assert heads["count_again"].kind == Kind.ROUTER_COUNTS


def test_tokens_without_a_graph_leave_the_dispatcher_without_a_gradient(heads):
    head = heads["cut_tokens"]
    assert head.code == "detached"
    assert head.explanation.subject.module.endswith("moe.dispatcher")
