"""The fault benchmark in other precisions: a bug in one precision may be the rule in another."""

import pytest

from moeverify.errors import CaseError
from moeverify.faults.choice import choose_faults
from moeverify.verification.controller.fault_benchmark import change_precision


def test_faults_that_are_none_in_a_precision_are_left_out():
    chosen = choose_faults(["A05", "I06", "M02", "M04", "O01"])
    for precision, numbers in {
        "float64": ["A05", "M02", "O01"],  # there FSDP2 divides itself, without an averaging collective
        "float32": ["A05", "I06", "M02", "O01"],
        "bfloat16": ["A05", "I06", "O01"],
        "mixed": ["A05", "I06", "M04", "O01"],
    }.items():
        changed = change_precision(chosen, precision)
        assert [fault.number for fault in changed] == numbers
        assert {fault.case.recipe.precision for fault in changed} == {precision}
        assert changed[-1].saver is not None
        assert changed[-1].saver.recipe.precision == precision
    assert [fault.case.recipe.precision for fault in chosen] == [
        "float64",
        "float32",
        "float32",
        "mixed",
        "float64",
    ]


def test_faults_whose_layout_cannot_have_a_precision_are_left_out():
    pipeline, data_parallel = choose_faults(["C19", "C11"])
    assert [fault.number for fault in change_precision([pipeline, data_parallel], "mixed")] == ["C11"]


def test_the_remedy_names_the_precisions_of_the_faults():
    with pytest.raises(CaseError) as caught:
        change_precision(choose_faults(["M04", "M05"]), "float32")
    (problem,) = caught.value.problems
    assert str(problem) == (
        "--precision: M04, M05: no bug in a recipe of float32; leave it out, or write mixed"
    )
