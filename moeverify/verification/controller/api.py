"""`moeverify.verify`: verification of one model under one layout from Python. Does not import torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import FunctionType
from typing import Any, Literal

from moeverify.cases.schema import Case, Precision
from moeverify.cases.validation.load import build_case, load_cases
from moeverify.errors import CaseError, MachineError, Problem
from moeverify.report.console import open_console
from moeverify.report.text import render_run, summarize_run
from moeverify.report.words.run import word_run
from moeverify.results.finding import Finding
from moeverify.results.run import CaseResult, Event, RunResult
from moeverify.verification.controller.escalation import escalate as ask_wider
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.controller.run import run_cases
from moeverify.verification.launch.world import external_world

Function = str | Callable[..., Any]


@dataclass(frozen=True, repr=False)
class Verification:
    """Result of `moeverify.verify`. `print` shows the same report as the command line."""

    result: RunResult

    @property
    def case(self) -> CaseResult:
        """Return the verdict with its checks and findings, in the form of `--json`."""
        return self.result.cases[0]

    @property
    def ok(self) -> bool:
        """Return whether every check passed and, unless undecided cases are allowed, decided enough."""
        is_allowed = self.case.verdict == "undecided" and self.result.allows_undecided
        return self.case.verdict == "pass" or is_allowed

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Return the differences between the layout and a single device."""
        return self.case.findings

    def __str__(self) -> str:
        """Return the report as text."""
        out = StringIO()
        render_run(self.result, open_console(out))
        return out.getvalue().rstrip()

    def __repr__(self) -> str:
        """Return the last line of the report."""
        return f"<Verification {summarize_run(self.result).plain}>"


def verify(
    model: Function,
    *,
    vocab_size: int,
    layout: Mapping[str, Any],
    parallelize: Function | None = None,
    loss: Function | None = None,
    step: Function | None = None,
    arguments: Mapping[str, Any] | None = None,
    batch: int = 8,
    seq_len: int = 16,
    min_valid: float = 0.5,
    steps: int = 2,
    seed: int = 0,
    precision: Precision = "float64",
    optimizer: Mapping[str, Any] | None = None,
    checks: Mapping[str, Any] | None = None,
    name: str = "verify",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    escalate: bool = True,
    allow_undecided: bool = False,
) -> Verification:
    """Return the differences between training under a layout and training on a single device.

    Example: `verify(make, parallelize=parallelize, vocab_size=96, layout={"tp": 2}).ok`.

    `model(**arguments)` creates the model. `parallelize(model, mesh)` is the user's parallel code. Without
    it the model is wrapped by DDP, FSDP1 or FSDP2. `step(model, optimizer, micro_batches)` performs an
    optimizer step, if given. A function is passed as an object or as `package.module:function`. The ranks
    import it, so it must be defined at the top level of a module. `layout`, `optimizer` and `checks` have
    the same fields as in a case file, and so have the other arguments. With `escalate`, a finding below
    float64 without a certain cause and an undecided result are examined in wider precisions. With
    `allow_undecided`, an undecided result is `ok`.

    Raises: CaseError for an invalid case; MachineError with too few ranks, or in one of several ranks.
    """
    if external_world() is not None:
        raise MachineError("verify() starts its own ranks; under torchrun or srun use `moeverify run CASE`")
    given = {"model": model, "loss": loss, "step": step, "parallelize": parallelize}
    named = {field: name_function(each, field) for field, each in given.items() if each is not None}
    made: dict[str, Any] = {"factory": named["model"], "vocab_size": vocab_size}
    made |= {"arguments": _check_plain(arguments)} if arguments else {}
    made |= {"loss": named["loss"]} if "loss" in named else {}
    fields = {
        "name": name,
        "recipe": {
            "model": made,
            "data": {"batch": batch, "seq_len": seq_len, "min_valid": float(min_valid)},
            "optimizer": dict(optimizer or {}),
            "precision": precision,
            "steps": steps,
            "seed": seed,
            **({"step": named["step"]} if "step" in named else {}),
        },
        "layout": {**layout, **({"parallelize": named["parallelize"]} if "parallelize" in named else {})},
        "checks": dict(checks or {}),
    }
    verified = _run([build_case(fields)], device, escalates=escalate)
    return Verification(verified.model_copy(update={"allows_undecided": allow_undecided}))


def verify_cases(
    *paths: str | Path, device: Literal["auto", "cpu", "cuda"] = "auto"
) -> dict[str, Verification]:
    """Return the verification of each case of these files and folders, by name; one launch serves all.

    Example: `assert all(each.ok for each in verify_cases("cases").values())`.

    Raises: CaseError when a case is invalid; MachineError when this process is itself one of several ranks.
    """
    if external_world() is not None:
        raise MachineError("verify_cases() starts its own ranks; under torchrun or srun use `moeverify run`")
    cases = load_cases([Path(path) for path in paths])
    verified = _run(cases, device, escalates=True, may_skip=True)
    return {
        case.name: Verification(verified.model_copy(update={"cases": (case,)})) for case in verified.cases
    }


def _run(
    cases: list[Case], device: Literal["auto", "cpu", "cuda"], *, escalates: bool, may_skip: bool = False
) -> RunResult:
    """Return the run of cases without recorded goldens.

    Raises: MachineError when a case is skipped, without `may_skip`.
    """
    options = RunOptions(device=device, golden_folder=None, must_decide=True)
    result = run_cases(cases, options, _ignore)
    assert result is not None
    skipped = next((case.reason for case in result.cases if case.verdict == "skipped"), None)
    if skipped is not None and not may_skip:
        raise MachineError(skipped)
    if escalates:
        result = ask_wider(cases, result, options, _ignore)
    return word_run(result)


def name_function(function: Function, field: str) -> str:
    """Return `package.module:function` for a function that the ranks can import.

    Raises: CaseError when they cannot import it: a lambda, a nested function, a function of the main
    script, or an object that is not a function.
    """
    if isinstance(function, str):
        return function
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    found = getattr(sys.modules.get(module or ""), name, None)
    if module != "__main__" and found is function:
        return f"{module}:{name}"
    if name == "<lambda>":
        reason = "is a lambda"
    elif "<locals>" in name:
        reason = f"`{name}` is made inside a function"
    elif module == "__main__":
        reason = f"`{name}` stands in the script that runs"
    elif isinstance(function, FunctionType | type):
        reason = f"`{module}:{name}` is not the object of this name in its module"
    else:
        reason = f"is an object of type {type(function).__name__}"
    remedy = "write it as a function at the top of a module: the ranks are other processes and import it"
    raise CaseError([Problem(f"{reason}, which no other process can import", path=field, remedy=remedy)])


def _check_plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(dict(arguments))
    except (TypeError, ValueError) as error:
        message = f"the ranks get the arguments as text, and {error}"
        raise CaseError(
            [Problem(message, path="arguments", remedy="pass numbers, texts, lists and dicts")]
        ) from None
    return dict(arguments)


def _ignore(event: Event) -> None:
    """Ignore an event."""
