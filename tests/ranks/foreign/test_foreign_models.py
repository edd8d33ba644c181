"""Models and functions of users' own: every way to give a loss, every way to be wrong."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize("name", ["plain", "fsdp1", "loss-sum", "loss-each", "reference"])
def test_right_case_passes(own: Any, name: str) -> None:
    case = own.results[name]
    assert (case.verdict, case.reason) == ("pass", "")


def test_losses_of_tokens_are_compared_where_the_model_gives_them(own: Any) -> None:
    numbers = {
        name: next(check.tensors for check in own.results[name].checks if check.name == "loss")
        for name in ("plain", "loss-each", "loss-sum")
    }
    # Two steps of 4 losses, and in each one tensor with the losses of all tokens.
    assert numbers == {"plain": 10, "loss-each": 10, "loss-sum": 8}


def test_routers_of_the_reference_model_are_seen_under_a_users_layout(own: Any) -> None:
    assert "routing" in {check.name for check in own.results["reference"].checks}


def test_buffers_of_every_kind_are_compared(own: Any) -> None:
    checks = {check.name: check for check in own.results["plain"].checks}
    assert checks["buffers"].tensors == 4  # two persistent buffers in two steps


def test_layout_that_divides_nothing_fails(own: Any) -> None:
    case = own.results["reference-forgotten"]
    assert case.verdict == "mismatch"
    assert {"replicas", "gradient"} <= {finding.check for finding in case.findings}


def test_finishing_function_is_called(own: Any) -> None:
    gradients = own.find("finish", "gradient")
    assert set(gradients) == {"embed.weight", "head.weight", "head.bias"}
    assert all(finding.scale == pytest.approx(0.5) for finding in gradients.values())


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("loss-mean", ["own_models:make", "when the batch is cut in two", "a sum over the valid tokens"]),
        ("dropout", ["another gradient each time", "switch off dropout"]),
        (
            "no-module",
            ["recipe.model.factory", "no module `own_modules`", "looked in", "the installed packages"],
        ),
        ("no-function", ["recipe.model.factory", "own_models.py", "no `mak`", "did you mean `make`?"]),
        ("no-callable", ["no function but another value `number`"]),
        ("no-model", ["`own_models:make_nothing` returned int and not a module"]),
        ("failing", ["ValueError at", "own_models.py:", "in make_failing", "the weights are gone"]),
        ("narrow", ["shape (4, 32) for 4 rows of 8 tokens", "return logits of shape (4, 8, vocab_size)"]),
        (
            "broken-import",
            ["import of `broken_import` failed", "a_package_that_is_not_there", "broken_import.py:1"],
        ),
        ("no-parallelize", ["layout.parallelize", "no `shard`", "did you mean"]),
    ],
)
def test_what_the_user_must_mend(own: Any, name: str, texts: list[str]) -> None:
    case = own.results[name]
    assert case.verdict == "error"
    assert [text for text in texts if text not in case.reason] == []
    assert case.rank_reports == ()


def test_parallelize_without_a_result(own: Any) -> None:
    case = own.results["nothing"]
    assert case.verdict == "error"
    assert "returned NoneType and not a module" in case.reason


def test_what_the_user_must_mend_costs_no_launch(own: Any) -> None:
    assert own.num_launches == 2  # the second one after `nothing`, which fails on the ranks


def test_folder_of_the_case_is_on_the_path(own: Any) -> None:
    assert "own" in own.results["no-module"].reason.partition("looked in ")[2].split(",")[0]
