"""`moeverify init`: a user's model is tried on one device and under layouts. Does not import torch."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moeverify.cases.document import parse_text
from moeverify.cases.function import examine_function
from moeverify.cases.validation.load import load_cases
from moeverify.errors import CaseError, MachineError, Problem
from moeverify.report.failed_ranks import find_reason
from moeverify.report.files import write_atomically
from moeverify.report.words.cause import describe_cause
from moeverify.results.cause import Cause
from moeverify.results.factory import Refused, TriedModel
from moeverify.results.run import CaseResult, Event, RunResult
from moeverify.verification.controller.init_files import AXES, Candidate, list_files, name_recipe
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.controller.run import OnEvent, run_cases
from moeverify.verification.controller.scratch import scratch_folder

_TRIAL = "moeverify.verification.worker.probes.factory"
_SECONDS = 600
_FACTORY = "PKG.MOD:NAME"  # as in the usage of the command
_EXPLAIN_SECONDS = 20.0  # a layout that does not apply may differ in everything


@dataclass(frozen=True)
class Tried:
    """A layout that was tried, with its result."""

    candidate: Candidate
    result: CaseResult

    @property
    def obstacle(self) -> str:
        """Return why the layout does not apply to the model; empty if its verdict counts."""
        if self.result.verdict in ("error", "skipped"):
            return find_reason(self.result) or "no rank says why"
        unused = [each for each in self.result.findings if each.code == Cause.LAYOUT]
        return describe_cause(unused[0]) or "an axis of the mesh is not used" if unused else ""


def parse_fields(texts: Sequence[str]) -> dict[str, Any]:
    """Return the values of `NAME=VALUE`, written as in YAML.

    Raises: CaseError for other texts.
    """
    found: dict[str, Any] = {}
    problems: list[Problem] = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            message = f"expected `NAME=VALUE`, got `{text}`"
            problems.append(Problem(message, path="--arg", remedy="write for example `n_layer=2`"))
            continue
        wrong: list[Problem] = []
        entry = parse_text(value, "", wrong.append, has_lines=False)
        problems += [replace(each, path=f"--arg {name}") for each in wrong]
        found[name] = entry.plain() if entry is not None else None
    if problems:
        raise CaseError(problems)
    return found


def try_factory(factory: str, parallelize: str, fields: Mapping[str, Any], root: Path) -> TriedModel:
    """Return a model that was tried on one device, by a process of its own in the folder `root`.

    `fields` are the values of some arguments, or of fields of the configuration.

    Raises: CaseError when the model cannot be verified.
    """
    for target, field in ((factory, _FACTORY), (parallelize, "--parallelize")):
        problem = examine_function(target, [str(root)], field) if target else None
        if problem is not None:
            raise CaseError([problem])
    with scratch_folder() as folder:
        file = folder / "model.json"
        command = [sys.executable, "-m", _TRIAL, factory, parallelize, json.dumps(fields), str(file)]
        try:
            done = subprocess.run(
                command, cwd=root, capture_output=True, text=True, timeout=_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            message = f"`{factory}` was not tried in {_SECONDS} s"
            remedy = "name a function that makes a smaller model"
            raise CaseError([Problem(message, path=_FACTORY, remedy=remedy)]) from None
        if not file.exists():
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            message = f"the process that tried `{factory}` ended with code {done.returncode}: {last}"
            raise CaseError([Problem(message, path=_FACTORY, remedy="call the function in a Python shell")])
        content = json.loads(file.read_text())
    if "message" in content:
        refused = Refused.model_validate(content)
        raise CaseError([Problem(refused.message, path=refused.path or factory, remedy=refused.remedy)])
    return TriedModel.model_validate(content)


def list_candidates(model: TriedModel) -> list[Candidate]:
    """Return the layouts of two ranks to try: DDP and FSDP2, then those of a `parallelize`."""
    found = [
        Candidate("ddp", "DDP", {"dp_replicate": 2, "data_parallel": "ddp"}),
        Candidate("fsdp2", "FSDP2", {"dp_shard": 2}),
    ]
    theirs = {"parallelize": "moeverify.stacks.transformers:parallelize"}
    if model.framework == "transformers":
        found += [
            Candidate("tp", "tensor parallelism of transformers", {"tp": 2, **theirs}),
            Candidate("fsdp", "FSDP of transformers", {"dp_shard": 2, **theirs}),
            Candidate(
                "tp-ep",
                "expert parallelism of transformers",
                {"tp": 2, **theirs, "arguments": {"ep_size": 2}},
            ),
        ]
    fabric = {"parallelize": "moeverify.stacks.lightning:parallelize"}
    if model.framework in ("lightning", "pytorch_lightning"):
        found += [
            Candidate("fabric-ddp", "DDP of Lightning Fabric", {"dp_replicate": 2, **fabric}),
            Candidate("fabric-fsdp2", "FSDP2 of Lightning Fabric", {"dp_shard": 2, **fabric}),
        ]
    own = {"parallelize": model.parallelize}
    if model.parallelize:
        found += [Candidate(f"own-{_dash(axis)}", f"over {axis}", {axis: 2, **own}) for axis in AXES]
        found += [
            Candidate(
                f"own-{_dash(name)}", "expert parallelism", {"dp_shard": 2, **own, "arguments": {name: 2}}
            )
            for name in model.expert_degrees
        ]
    return found


def combine(tried: Sequence[Tried]) -> list[Candidate]:
    """Return layouts of four ranks: pairs of axes over which the same `parallelize` has passed."""
    layouts = [each.candidate.layout for each in tried if each.result.verdict == "pass" and not each.obstacle]
    plain = [each for each in layouts if "parallelize" in each and "arguments" not in each]
    found = []
    for first, second in itertools.combinations(plain, 2):
        both = [axis for axis in AXES if axis in {**first, **second}]
        if first["parallelize"] == second["parallelize"] and len(both) == 2:
            own = "" if first["parallelize"].startswith("moeverify.") else "own-"
            layout = {**dict.fromkeys(both, 2), "parallelize": first["parallelize"]}
            found.append(Candidate(own + "-".join(map(_dash, both)), f"over {' and '.join(both)}", layout))
    return found


def _dash(name: str) -> str:
    return name.replace("_", "-")


def try_layouts(
    model: TriedModel, root: Path, folder: str, candidates: Sequence[Candidate], on_event: OnEvent
) -> tuple[list[Tried], RunResult]:
    """Return the results of layouts, run from the very texts that are written later.

    Raises: MachineError when this process is one of several ranks.
    """
    recipe = name_recipe(model)
    wanted = {f"{recipe}-{each.name}": each for each in candidates}

    def show(event: Event) -> None:
        """Show a layout that does not apply as skipped, although its verdict may be a mismatch."""
        result = event.result if event.kind == "case-end" else None
        obstacle = Tried(wanted[event.case], result).obstacle if result is not None else ""
        if result is not None and obstacle:
            skipped = result.model_copy(update={"verdict": "skipped", "reason": obstacle})
            event = event.model_copy(update={"result": skipped})
        on_event(event)

    with scratch_folder() as scratch:
        for path, text in list_files(root, folder, model, candidates):
            write_atomically(scratch / path, text)
        cases = load_cases([scratch / folder])
        options = RunOptions(golden_folder=None, explain_seconds=_EXPLAIN_SECONDS, must_decide=True)
        result = run_cases(cases, options, show)
    if result is None:
        raise MachineError("`moeverify init` starts its own ranks; run it without torchrun or srun")
    # The files will be elsewhere, and that no golden is recorded for them is no news.
    placed = [
        case.model_copy(update={"notes": (), "file": str(Path(folder, f"{case.name}.yaml"))})
        for case in result.cases
    ]
    results = {case.name: case for case in placed}
    return [Tried(each, results[name]) for name, each in wanted.items()], result.model_copy(
        update={"cases": tuple(placed)}
    )
