"""`diff --golden`: programs provide expected tensors; shards are assembled and replicas distinguished."""

import itertools

import pytest

from multiprocessing_pdb.console.golden import LogicalTensor, format_verdicts
from multiprocessing_pdb.console.target import Target


@pytest.fixture
def ranks(site):
    site.start_ranks(4, "expected.py", 30)
    site.await_ranks(4)
    return site


def test_shards_are_one_tensor_and_the_rank_that_differs_is_named(ranks):
    said = ranks.ask(
        "diff --golden 'right'",
        "diff --golden 'wrong'",
        "diff --golden 'near'",
        "diff --golden 'nan'",
        "diff --golden",
    )
    right, wrong, near, nan, everything = said.split("ranks 0-3: ")[1:]
    assert right == "weight w is as in the golden: relative error 0, bound 0.1\n"
    assert wrong == (
        "wrong w differs from the golden: relative error 1, bound 0.1\n"
        "  on rank 3; most on rank 3 at [1, 2]: expected 3, actual 8\n"
    )
    # sqrt(0.16 + 0.16) / 5: replicas count once; one shard alone would be within the bound.
    assert near.startswith(
        "weight w differs from the golden: relative error 0.113, bound 0.1\n  on ranks 0-3;"
    )
    assert nan.startswith("weight w differs from the golden: relative error inf, bound 0.1\n")
    assert "actual nan" in nan
    assert everything == (
        "1 of 3 tensors differ from the golden\n"
        "  wrong w: relative error 1, bound 0.1\n"
        "    on rank 3; most on rank 3 at [1, 2]: expected 3, actual 8\n"
        "  the optimizer's state is left out\n"
    )


def test_what_cannot_be_compared_is_said_of_the_ranks_and_is_no_equality(ranks):
    done = ranks.run_console("diff --golden 7", "diff --golden nothing", "diff --golden print()")
    assert "ranks 0-3: *** LookupError: nothing is expected of 7" in done.stdout
    assert "ranks 0-3: *** NameError: name 'nothing' is not defined" in done.stdout
    assert "ranks 0-3: *** print() is None here" in done.stdout
    assert "as in the golden" not in done.stdout
    said = ranks.ask("diff --golden 'right' if RANK < 2 else 1 / 0")
    assert "relative error 0, bound 0.1; no value of ranks 2-3\n" in said
    said = ranks.ask("diff --golden 'slow'", "@all p 1", options=["--deadline", "1"])
    assert "*** no answer in 1 s" in said
    assert "as in the golden" not in said
    assert "ranks 0-3: 1" in said  # at once: it does not continue for 30 s


def test_a_program_without_expected_values_is_told_what_to_do(site):
    site.start_ranks(1, "expected.py")
    site.await_ranks(1)
    said = site.ask("diff --golden x")
    assert "this process knows no expected values: the ranks of `moeverify run` do" in said
    assert "`moeverify compare` compares two" in said


STRANGE = [None, -1.0, 10**400, "1e999", "nan", "-inf", "x", "", [], {}, True, "\x1b]0;title\x07"]


def test_rows_that_make_no_sense_are_no_equality_and_harm_no_console():
    right = {"name": "w", "region": "0", "squared_error": 0.0, "norm": 1.0, "bound": 0.1}
    targets = [Target(None, "0", "job")]
    for field, value in itertools.product(("squared_error", "norm", "bound"), STRANGE):
        row = {**right, "squared_error": 1.0, field: value, "index": value, "expected": value}
        tensor = LogicalTensor("w", [(targets[0], row)])
        for tensors in ([tensor], [tensor, tensor]):
            head, *rest = format_verdicts(tensors, targets)
            assert "from the golden" in head, row
            assert rest
