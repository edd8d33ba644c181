"""Users' own models and functions: every way to give a loss, and every kind of mistake."""

from __future__ import annotations

from typing import Any

import pytest

from moeverify.report.words.check import word_check
from moeverify.report.words.run import word_finding


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "fsdp1",
        "settings",
        "loss-sum",
        "loss-each",
        "reference",
        "group-factory",
        "own-expert",
        "rounded-expert",
        "unused-declared",
        "engine",
    ],
)
def test_right_case_passes(own: Any, name: str) -> None:
    case = own.results[name]
    assert (case.verdict, case.reason) == ("pass", "")


def test_losses_of_tokens_are_compared_where_the_model_gives_them(own: Any) -> None:
    numbers = {
        name: next(check.tensors for check in own.results[name].checks if check.name == "loss")
        for name in ("plain", "loss-each", "loss-sum")
    }
    # Two steps of 4 losses, and in each step a tensor with the losses of all tokens.
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


def test_an_axis_that_nothing_uses_fails_although_everything_is_right(own: Any) -> None:
    case = own.results["unused"]
    assert case.verdict == "mismatch"
    (finding,) = map(word_finding, case.findings)
    assert (finding.check, finding.tensor) == ("sharding", "axis tp")
    assert finding.cause == "no parameter is divided over tp, and no collective of the model ran over it"
    assert finding.evidence[-1] == "if that is meant, declare it by checks.allow_replicated: [tp]"


def test_what_each_axis_divides_is_said(own: Any) -> None:
    checks = {check.name: check for check in own.results["own-expert"].checks}
    (use,) = checks["sharding"].facts.axes
    assert (use.axis, use.num_divided, use.num_parameters) == ("tp", 4, 7)
    assert use.share == pytest.approx(144 / 688)  # two experts of four tensors; embedding and head are whole
    assert use.collectives == {"all_reduce": 4}  # forward and backward, in two steps
    assert word_check(checks["sharding"]).note == "tp divides 4 of 7 parameters, 4 all_reduce"


def test_a_gradient_norm_counts_what_one_rank_alone_holds(own: Any) -> None:
    checks = {check.name: check for check in own.results["own-expert"].checks}
    assert checks["gradient norm"].worst.error < 1e-12
    assert checks["gradient norm"].tensors == 4  # norm and clip coefficient of two steps


def test_gradients_that_a_framework_keeps_elsewhere_are_explained(own: Any) -> None:
    case = own.results["no-gradients"]
    assert case.verdict == "error"
    assert "every `.grad` is None" in case.reason
    assert "return (model, engine) from `parallelize`" in case.reason


def test_a_factory_that_makes_groups_does_not_cost_the_cause(own: Any) -> None:
    gradients = own.find("group-factory-wrong", "gradient")
    assert "scale" in {finding.code for finding in gradients.values()}


def test_a_term_that_a_users_loss_names_is_named_in_the_cause(own: Any) -> None:
    gradients = own.find("loss-terms", "gradient")
    (first,) = [finding for finding in gradients.values() if not finding.follows]
    assert first.code == "term-scale"
    assert "the part of the spread loss is 2x too large" in word_finding(first).cause
    assert set(own.find("loss-terms", "loss")) == {"total", "lm", "spread"}


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
    assert own.num_launches == 3  # one more after `nothing` and `no-gradients`, which fail on the ranks


def test_folder_of_the_case_is_on_the_path(own: Any) -> None:
    assert "own" in own.results["no-module"].reason.partition("looked in ")[2].split(",")[0]


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("moe-by-sender", "first wrong input: in `part @ w_in[e]` (mm), my_moe/model.py:"),
        (
            "moe-not-put-back",
            "first wrong input: in `back.unflatten(0, (-1, self.top_k)) * weights.flatten(0, -2)[..., None]` (mul)",
        ),
        ("moe-rounded", "first wrong operation: `received.bfloat16()` (_to_copy), own_moes.py:"),
    ],
)
def test_rows_of_an_own_dispatch_are_followed_whatever_their_order(own: Any, name: str, cause: str) -> None:
    """Ranks have different rows than one device, from other ranks' tokens and in another order."""
    first = own.results[name].findings[0]
    assert first.place is not None
    assert first.place.module == "tower.0"
    assert word_finding(first).cause.startswith(cause)


def test_what_a_user_switched_off_the_loop_does_not_switch_on(own: Any) -> None:
    """Otherwise gradients of a unit with disabled reduction would be right, unlike in the user's run."""
    case = own.results["not-reduced"]
    first = case.findings[0]
    assert (case.verdict, first.kind, first.tensor) == ("mismatch", "gradient", "head.weight")
    assert "absent" in word_finding(first).cause


def test_forgotten_head_norms_are_named(own: Any) -> None:
    assert own.results["gpt-wrong"].verdict == "mismatch"
    norms = {f"h.{layer}.attn.{name}_norm.weight" for layer in (0, 1) for name in ("query", "key")}
    replicas, gradients = (own.find("gpt-wrong", check) for check in ("replicas", "gradient"))
    assert norms & set(replicas)
    assert gradients
    assert norms >= set(gradients)
    assert all("tp" in finding.coordinates for finding in gradients.values())


def test_sums_beside_averages_are_named(own: Any) -> None:
    gradients = own.find("moe-summed", "gradient")
    experts = {f"tower.{layer}.experts.{name}" for layer in (0, 1) for name in ("w_in", "w_out")}
    assert gradients
    assert experts >= set(gradients)
    for finding in gradients.values():
        assert finding.scale == pytest.approx(2.0)
        assert finding.cosine == pytest.approx(1.0)
