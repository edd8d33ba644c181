"""Mutants on real ranks: killed by a check, killed by a crash that costs no other mutant, or surviving."""

import pytest

from moeverify.faults.mutation.mutant import find_mutant
from moeverify.results.mutation import CoveredCode, MutantRow
from moeverify.verification.controller.kept import KeptRows
from moeverify.verification.controller.mutation import MutationRun, list_cases, measure_coverage
from moeverify.verification.controller.options import RunOptions

NORM = "train.clipping:gradient_norm:double-collective:1"
CRASH = "parallel.context_parallel:split_positions:off-by-one:0"
SAME = "parallel.collectives:sum_over:skip-detach:0"


def ignore(event):
    pass


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mutants")
    return RunOptions(device="cpu", golden_folder=folder / "none", cache_folder=folder / "cache", timeout=120)


@pytest.fixture(scope="module")
def covered(options):
    return measure_coverage([list_cases()["pp"]], options, ignore, KeptRows(None, {}, CoveredCode))


def test_what_a_layout_executes_is_what_its_ranks_execute(covered):
    (row,) = covered
    assert (row.name, row.ranks) == ("pp", 2)
    assert find_mutant(NORM).is_executed(row.spans["train/clipping.py"])
    assert set(row.spans) >= {"parallel/pipeline.py", "train/pipeline.py", "parallel/plan.py"}
    assert "parallel/context_parallel/ring.py" not in row.spans
    tied = find_mutant("parallel.gradients:add_shared:lost-term:0")
    assert not tied.is_executed(row.spans.get(tied.file, ()))


def test_each_mutant_ends_for_itself_and_what_is_kept_is_not_run_again(covered, options, tmp_path):
    mutants = [find_mutant(name) for name in (CRASH, NORM, SAME)]
    here = {"torch": "?"}
    kept = KeptRows(tmp_path / "rows", here, MutantRow)
    run = MutationRun(mutants, covered, kept)
    crash, norm, same = run.execute(options, ignore)
    assert (crash.outcome, norm.outcome) == ("crashed", "detected")
    assert same.outcome in ("survived", "equivalent")
    assert (norm.finding.code, norm.finding.place.axes, norm.cases) == ("norm", ("pp",), ("pp",))
    assert norm.loss_and_norm
    again = MutationRun(mutants, covered, KeptRows(tmp_path / "rows", here, MutantRow))

    def never(event):
        raise AssertionError("nothing is to be run")

    assert again.execute(options, never) == [crash, norm, same]


def test_code_that_no_layout_executes_runs_no_mutant(options):
    run = MutationRun([find_mutant(NORM)], [], KeptRows(None, {}, MutantRow))
    (row,) = run.execute(options, ignore)
    assert (row.outcome, row.cases) == ("not executed", ())


def test_what_is_covered_is_kept(covered, tmp_path):
    kept = KeptRows(tmp_path / "lines", {}, CoveredCode)
    kept.add(covered[0])
    assert KeptRows(tmp_path / "lines", {}, CoveredCode).rows == {"pp": covered[0]}
