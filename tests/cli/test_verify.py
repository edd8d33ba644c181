"""The Python interface, `moeverify.verify`."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import moeverify
from moeverify.errors import CaseError, MachineError
from moeverify.report.words.wider import describe_wider
from moeverify.verification.controller.api import name_function

EXAMPLES = Path(__file__).parents[2] / "examples"
LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
FAST = {
    "vocab_size": 96,
    "arguments": {"num_layers": 1},
    "layout": {"tp": 2},
    "steps": 1,
    "checks": {"repeat": "never"},
}


@pytest.fixture(autouse=True)
def own_world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(EXAMPLES)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_gpt"]:
        del sys.modules[name]


@pytest.mark.ranks
def test_an_undecided_result_is_ok_only_if_it_is_allowed() -> None:
    from my_gpt.model import make, parallelize

    wide = {"repeat": "never", "tolerance": {"kind": "fixed", "rtol": 0.5, "atol": 0.0}}
    for allowed in (False, True):
        words = {**FAST, "checks": wide, "allow_undecided": allowed}
        result = moeverify.verify(make, parallelize=parallelize, **words)
        assert (result.case.verdict, result.ok) == ("undecided", allowed), str(result)


@pytest.mark.ranks
def test_right_model_is_ok() -> None:
    from my_gpt.model import make, parallelize

    result = moeverify.verify(make, parallelize=parallelize, **FAST)
    assert result.ok, str(result)
    assert result.findings == ()
    assert result.case.ranks == 2
    assert "pass  1 case: 1 pass" in str(result)
    assert "is not recorded" not in str(result)


@pytest.mark.ranks
def test_wrong_model_is_not_ok() -> None:
    result = moeverify.verify("my_gpt.model:make", parallelize="my_gpt.wrong:parallelize", **FAST)
    assert not result.ok
    assert any(finding.tensor == "h.0.attn.query_norm.weight" for finding in result.findings)
    assert "h.0.attn.query_norm.weight" in str(result)
    assert "moeverify run" not in str(result)  # there is no case file to name in such a command
    assert "MISMATCH" in repr(result)


@pytest.mark.ranks
@pytest.mark.parametrize("escalate", [True, False])
def test_a_finding_below_float64_is_asked_of_wider_precisions(escalate: bool) -> None:
    chosen: dict[str, Any] = FAST | {"precision": "bfloat16", "escalate": escalate}
    result = moeverify.verify("my_gpt.model:make", parallelize="my_gpt.wrong:parallelize", **chosen)
    assert not result.ok
    asked = [finding for finding in result.findings if finding.wider]
    assert bool(asked) == escalate, str(result)
    assert {each.precision for finding in asked for each in finding.wider} <= {"float32", "float64"}
    # On a busy machine a wider run may end at its limit, and then the report says so.
    said = [line for finding in asked for line in describe_wider(finding)]
    assert any(line in str(result) for line in said) == escalate, str(result)


@pytest.mark.ranks
def test_a_pass_of_an_own_model_is_asked_of_float32_only_if_it_is_undecided() -> None:
    decided, undecided = (
        moeverify.verify("my_gpt.model:make", **FAST | {"precision": precision, "layout": {"dp_shard": 2}})
        for precision in ("float32", "bfloat16")
    )
    assert decided.ok, str(decided)
    assert (decided.result.launches, decided.case.decided_in) == (1, "")
    assert undecided.ok, str(undecided)
    assert (undecided.result.launches, undecided.case.decided_in) == (2, "float32")


def make_here() -> None:
    pass


class _Maker:
    def __call__(self) -> None:
        pass


def _main_function() -> Any:
    function = eval("lambda: None", {"__name__": "__main__"})
    function.__name__ = function.__qualname__ = "make"
    return function


def test_function_is_named_by_its_module() -> None:
    assert name_function(make_here, "model") == f"{__name__}:make_here"
    assert name_function("a.b:c", "model") == "a.b:c"


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda: None, "is a lambda"),
        (functools.partial(make_here), "an object of type partial"),
        (_Maker(), "an object of type _Maker"),
        (_main_function(), "`make` stands in the script that runs"),
        (_Maker.__call__, "is not the object of this name"),
    ],
)
def test_function_that_no_rank_can_import(function: Any, text: str) -> None:
    with pytest.raises(CaseError, match="no other process can import") as caught:
        name_function(function, "model")
    assert text in str(caught.value)
    assert str(caught.value).startswith("model: ")


def test_function_inside_another() -> None:
    def inner() -> None:
        pass

    with pytest.raises(CaseError, match=r"`test_function_inside_another\.<locals>\.inner` is made inside"):
        moeverify.verify(inner, vocab_size=8, layout={})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"layout": {"dp_shards": 2}},
            "layout.dp_shards: unknown field `dp_shards`; did you mean `dp_shard`?",
        ),
        ({"layout": {"dp_shard": 3}}, "layout.dp_shard: recipe.data.batch 8 is not divisible by dp_shard 3"),
        ({"optimizer": {"betas": [0.9, 2.0]}}, "recipe.optimizer.betas"),
        ({"arguments": {"dtype": object()}}, "arguments: the ranks get the arguments as text"),
        ({"vocab_size": 0}, "recipe.model.vocab_size"),
        ({"model": "my_gpt"}, "recipe.model.factory: expected `package.module:function`"),
    ],
)
def test_bad_field(change: dict[str, Any], text: str) -> None:
    fields: dict[str, Any] = {"model": "my_gpt.model:make", "vocab_size": 8, "layout": {}} | change
    with pytest.raises(CaseError) as caught:
        moeverify.verify(fields.pop("model"), **fields)
    assert text in str(caught.value)


def test_more_ranks_than_the_machine_has() -> None:
    with pytest.raises(MachineError, match="needs 65536 ranks"):
        moeverify.verify("my_gpt.model:make", vocab_size=8, layout={"dp_shard": 65536}, batch=65536)


def test_inside_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(LAUNCHER, ("0", "2", "localhost", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(MachineError, match="starts its own ranks"):
        moeverify.verify("my_gpt.model:make", vocab_size=8, layout={})


def test_import_is_light() -> None:
    code = "import sys, moeverify; moeverify.verify; print('torch' in sys.modules, moeverify.__all__)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "False ['Verification', 'verify', 'verify_cases', 'watch']\n"
    with pytest.raises(AttributeError, match="has no attribute 'verfy'"):
        moeverify.verfy  # noqa: B018
