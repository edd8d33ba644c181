"""Mixed precision in a user's own code: the actual dtypes of each module under a policy."""

from __future__ import annotations

from typing import Any

import pytest

from moeverify.report.words.cause import describe_cause


@pytest.mark.parametrize("name", ["built-in", "right", "micro-batches", "wide-norms", "autocast"])
def test_what_was_asked_for_is_seen(mixed: Any, name: str) -> None:
    case = mixed.results[name]
    assert (case.verdict, case.reason, case.findings) == ("pass", "", ())
    # Each of 12 parameters is computed, reduced and stored, and so is its gradient; SGD has no state here.
    # Each of 11 modules has an output, and 9 have operators of their own.
    assert next(check.tensors for check in case.checks if check.name == "precision") == 48 + 11 + 9


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("forgotten", {"the model": "the model computes with parameters in float32 instead of bfloat16"}),
        (
            "experts-without",
            {"layers.1.experts": "layers.1.experts computes with parameters in float32 instead of bfloat16"},
        ),
        (
            "wide-undeclared",
            {
                f"layers.{number}.{part}": "computes with parameters in float32 instead of bfloat16"
                for number in (0, 1)
                for part in ("norm", "router")
            },
        ),
        (
            "narrow-declared",
            {
                f"layers.{number}.{part}": "computes with parameters in bfloat16 instead of float32"
                for number in (0, 1)
                for part in ("norm", "router")
            },
        ),
        (
            "narrow-reduction",
            {"the model": "the gradients of the model are reduced in bfloat16 instead of float32"},
        ),
        (
            "narrow-reduction-of-one",
            {
                "layers.0.experts": "the gradients of layers.0.experts are reduced in bfloat16 instead of float32"
            },
        ),
        # pytorch #190626: FSDP2 sums over the ranks of tensor parallelism before it widens.
        ("sequence", {"norm": "the gradients of norm are reduced in bfloat16 instead of float32"}),
    ],
)
def test_only_the_dtype_tells(mixed: Any, name: str, expected: dict[str, str]) -> None:
    case = mixed.results[name]
    assert case.verdict == "mismatch"
    assert {finding.check for finding in case.findings} == {"precision"}
    causes = {finding.tensor: describe_cause(finding) for finding in case.findings}
    assert causes.keys() == expected.keys()
    assert [cause for place, cause in causes.items() if expected[place] not in cause] == []
    assert {finding.code for finding in case.findings} == {"precision"}


def test_what_is_compiled_is_left_alone_and_counted(mixed: Any) -> None:
    case = mixed.results["compiled"]
    assert (case.verdict, case.reason, case.findings) == ("pass", "", ())
    assert any(
        "10 of 12 parameters" in note and "were not seen in a computation" in note for note in case.notes
    )
    named = {finding.tensor for finding in mixed.results["compiled-without"].findings}
    assert named == {"embed", "head"}


def test_narrow_weights_are_seen_where_they_are_kept(mixed: Any) -> None:
    causes = {describe_cause(f) for f in mixed.results["narrow-storage"].findings if f.check == "precision"}
    assert causes == {
        "the parameters of the model are kept in bfloat16 instead of float32",
        "the gradients of the model are kept in bfloat16 instead of float32",
        "the gradients of the model are reduced in bfloat16 instead of float32",
    }
