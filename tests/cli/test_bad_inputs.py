"""Bad inputs of every kind, made from good ones: no traceback, hang or data loss.

Each input is either refused or accepted. The inputs are reproducible; MOEVERIFY_TEST_BAD_INPUTS=2000 asks
for that many new ones of each kind.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from spoiled import (
    COUNT,
    Hang,
    impatience,
    judge,
    make_random,
    spoil_bytes,
    spoil_json,
    spoil_lines,
    spoil_yaml,
)

from moeverify.cases.validation.load import load_cases
from moeverify.errors import CaseError, FormatError
from moeverify.parallel.regions.region import Region
from moeverify.report.formats.json import read_run
from moeverify.report.formats.registry import write_run
from moeverify.report.operator_file import name_file
from moeverify.report.operator_file import write as write_table
from moeverify.results.cause import Cause
from moeverify.results.facts import CollectiveFacts, Issue
from moeverify.results.failure import EndKind, RankEnd
from moeverify.results.finding import Finding
from moeverify.results.operator_table import (
    CallSite,
    Compared,
    Operator,
    OperatorList,
    OperatorResult,
    OperatorTable,
)
from moeverify.results.place import Place
from moeverify.results.run import CaseResult, Event, RankReport
from moeverify.results.trace import CollectiveRecord
from moeverify.tools.checkpoint.hyperrect import Hyperrect
from moeverify.tools.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    StoredChunk,
    StoredFile,
    StoredTensor,
    read_manifest,
    write_manifest,
)
from moeverify.tools.placement.synthetic import make_trace
from moeverify.tools.placement.trace_file import TraceWriter
from moeverify.verification.controller.finished import FinishedCases
from moeverify.verification.controller.goldens import GoldenSet
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.golden.file import GoldenFile, golden_path, write_golden
from moeverify.verification.golden.store import GoldenWriter, StoredGolden
from moeverify.verification.jobs import GoldenSummary
from moeverify.verification.worker.golden import find_damage

pytestmark = pytest.mark.slow

CASES = Path(__file__).parents[2] / "cases"


@pytest.fixture
def try_all(tmp_path: Path) -> Callable[..., None]:
    """Return a function that corrupts a file repeatedly and keeps the inputs with a bad outcome."""

    def do(kind: str, file: Path, spoil: Any, attempt: Callable[[], str]) -> None:
        dice, good, bad = make_random(kind), file.read_bytes(), []
        for number in range(COUNT):
            file.write_bytes(spoil(good, dice))
            try:
                with impatience():
                    outcome = attempt()
            except (Exception, Hang) as error:
                outcome = repr(error)
            if outcome:
                shutil.copy(file, tmp_path / f"bad-{number}")
                bad.append(f"{tmp_path / f'bad-{number}'}: {outcome}")
        file.write_bytes(good)
        assert not attempt(), "the good one is refused"
        assert bad == []

    return do


@pytest.mark.parametrize(
    "name",
    [
        *("fsdp2-cp-ep", "megablocks-fp32", "forced", "gpt-tp", "ep2-graphs", "ep2-joined", "ep2-exchange"),
        *("float8-tp-sp", "float8-mixed-fsdp2", "ep4-replicas", "pp-zbv", "tp-ep-etp-sp"),
    ],
)
def test_cases(invoke: Any, try_all: Any, tmp_path: Path, name: str) -> None:
    shutil.copytree(CASES, tmp_path / "cases")
    source = tmp_path / "cases" / f"{name}.yaml"
    for path in (tmp_path / "cases").glob("*.yaml"):
        if path != source:
            path.unlink()
    (source.parent / "good.yaml").write_text("recipe: {model: {preset: stress}}\nlayout: {dp_shard: 2}\n")
    codes = (0, 2)
    command = "mesh" if len(name) % 2 else "check"
    try_all(f"cases {name}", source, spoil_yaml, lambda: judge(invoke(command, source.parent), codes))


@pytest.mark.parametrize("name", ["stress-adamw", "stress-float8-mixed", "deepseek-v3", "megablocks-own"])
def test_recipes(invoke: Any, try_all: Any, tmp_path: Path, name: str) -> None:
    shutil.copytree(CASES / "recipes", tmp_path / "recipes")
    (tmp_path / "a.yaml").write_text(f"recipe: {name}\nlayout: {{dp_shard: 2}}\n")
    recipe = tmp_path / "recipes" / f"{name}.yaml"
    try_all(f"recipe {name}", recipe, spoil_yaml, lambda: judge(invoke("check", tmp_path), (0, 2)))


@pytest.mark.parametrize("option", ["layout.tp", "recipe.model.moe", "recipe.steps", "checks.skip"])
def test_overrides(invoke: Any, case_file: Path, option: str) -> None:
    dice = make_random(option)
    for _ in range(COUNT):
        value = spoil_bytes(dice.choice((b"2", b"{a: 1}", b"[x]", b"true")), dice).decode("latin-1")
        with impatience():
            assert not judge(invoke("check", case_file, "--set", f"{option}={value}"), (0, 2)), repr(value)


DIFFERING = CollectiveFacts(
    axis="tp",
    ranks=(0, 1),
    number=3,
    issues=(Issue(ranks=(0,), signature="b"),),
    counts={0: 3, 1: 2},
    group="7",
)


@pytest.mark.parametrize("command", ["report", "explain", "diff", "history"])
def test_results_with_findings(invoke: Any, keep: Any, try_all: Any, command: str) -> None:
    """Corrupt the results of a case that differs and of one that hung."""
    file = keep("run", "mismatch", 1.0) / "result.json"
    run = read_run(file)
    fields = {
        "kind": "",
        "step": -1,
        "rank": 0,
        "ranks": (0, 1),
        "error": 1.0,
        "bound": 0.0,
        "coordinates": {},
    }
    finding = Finding(
        check="trace", tensor="tp group (0,1)", code=Cause.COLLECTIVES, facts=DIFFERING, **fields
    )
    place = Place(ranks=(0,), axes=("tp",))
    numbers = {"expected": 1.0, "actual": 2.0, "index": (0, 3), "kind": "gradient", "step": 0}
    other = Finding(check="gradient", tensor="a.weight", place=place, **fields | numbers)
    place_in = {"group": (0, 1), "group_name": "7", "axis": "tp", "sequence": 3, "number": 9, "peer": -1}
    what = {"op": "all_reduce", "shape": (4,), "dtype": "float64", "num_tensors": 1, "signature": "b"}
    state = {"site": "a.py:1 in f", "state": "started", "started": 1.0, "seconds": None}
    record = CollectiveRecord(**place_in, **what, **state)
    rank = {
        "rank": 0,
        "state": "hung",
        "end": RankEnd(how=EndKind.OVER_TIME, timeout=3.0),
        "recent": (record,),
    }
    rank |= {"collective": record, "stack": "File x.py, line 3", "pid": 7, "host": "here"}
    hung = {"verdict": "error", "name": "hung", "rank_reports": (RankReport(**rank),), "reason": "why"}
    changes: tuple[dict[str, Any], ...] = ({"findings": (finding, other)}, hung)
    cases = tuple(run.cases[0].model_copy(update=each) for each in changes)
    write_run("json", run.model_copy(update={"cases": cases}), file)
    place_of = {"history": file.parent.parent}.get(command, file.parent)
    more = {
        "diff": [keep("other")],
        "report": ["--html", file.parent / "p.html", "--csv", file.parent / "c.csv"],
    }
    codes = (0, 1, 2) if command == "diff" else (0, 2)
    words = (command, place_of, *more.get(command, []))
    try_all(f"findings {command}", file, spoil_json, lambda: judge(invoke(*words), codes))


def test_kept_verdicts(case_file: Path, tmp_path: Path, try_all: Any) -> None:
    cases, options = load_cases([case_file]), RunOptions(device="cpu")
    file = tmp_path / "kept.jsonl"
    result = CaseResult(name="fsdp2-2", file="", verdict="mismatch", ranks=2, seconds=1.0)
    finished = FinishedCases.open(file, cases, options)
    finished.keeping(lambda event: None)(Event(kind="case-end", case=result.name, result=result))

    def attempt() -> str:
        content = file.read_bytes()
        try:
            found = FinishedCases.open(file, cases, options).results
        except (FormatError, CaseError) as error:
            return "" if file.read_bytes() == content else f"the file was changed: {error}"
        return "" if all(each.verdict in ("pass", "mismatch") for each in found.values()) else str(found)

    try_all("kept", file, spoil_lines, attempt)


@pytest.mark.parametrize("command", ["report", "explain", "diff", "operators"])
def test_results(invoke: Any, keep: Any, try_all: Any, command: str) -> None:
    file = keep("run", "mismatch", 1.0) / "result.json"
    other = (keep("other"),) if command == "diff" else ()
    codes = (0, 1, 2) if command == "diff" else (0, 2)
    files = {
        "report": ("--html", file.parent / "page.html", "--junit", file.parent / "r.xml"),
        "operators": ("--html", file.parent / "page.html"),
    }
    with_html = files.get(command, ())

    try_all(command, file, spoil_json, lambda: judge(invoke(command, file.parent, *other, *with_html), codes))


def test_operators(invoke: Any, keep: Any, try_all: Any) -> None:
    folder = keep("run", "mismatch", 1.0)
    file = name_file(folder, "case")
    site = CallSite(file="a.py", line=3, function="f", expression="a + b")
    results = (OperatorResult(shape=(2, 3), dtype="float64"),)
    ops = tuple(
        Operator(
            name=name, phase="forward", module="m", sites=(0,), results=results, inputs=inputs, ranks=(0, 1)
        )
        for name, inputs in (("mm.default", ("w",)), ("collective.all_reduce", (0,)))
    )
    listed = OperatorList(sites=(site,), operators=ops)
    compared = (
        Compared(outcome="match", other=0, place="whole", error=0.0),
        Compared(outcome="differs", other=1, error=0.5, factor=2.0),
    )
    table = OperatorTable(
        version=1,
        title="case",
        step=0,
        expected_name="one",
        actual_name="many",
        bound=1e-8,
        expected=(listed,),
        actual=(listed,),
        compared=(compared,),
        causes=((0, 1),),
    )
    write_table(table, file)
    file.write_bytes(gzip.decompress(file.read_bytes()))  # to be spoiled; it is read either way
    run = read_run(folder)
    cases = (run.cases[0].model_copy(update={"operators": str(file)}),)
    write_run("json", run.model_copy(update={"cases": cases}), folder / "result.json")
    words = ("operators", folder, "--html", folder / "page.html")
    assert invoke(*words).exit_code == 0
    try_all("operators", file, spoil_json, lambda: judge(invoke(*words), (0, 2)))


def test_goldens(case_file: Path, tmp_path: Path, try_all: Any) -> None:
    cases = load_cases([case_file])
    goldens = GoldenSet.of(
        cases, RunOptions(golden_folder=tmp_path / "golden", cache_folder=tmp_path / "cache")
    )
    [folder] = goldens.orders
    answer = GoldenSummary(
        losses={"0/loss/total": 4.5}, tensors={"0/gradient/w": [3.0, 1.0, -1.0], "0/ids/e": "ab"}
    )
    path = golden_path(tmp_path / "golden", cases[0].recipe.name, "cpu")
    file = goldens.make_file(folder, answer, "cpu")
    assert isinstance(file, GoldenFile)
    write_golden(path, file)
    good = path.read_bytes()

    def attempt() -> str:
        state = goldens.examine(folder, answer, "cpu")
        kept, found = json.loads(good), _load(path.read_bytes()) or {}
        same = all(
            kept[field] == found.get(field, kept[field])
            for field in ("recipe", "losses", "tensors", "version")
        )
        return f"{state} is taken" if state.status == "recorded" and not same else ""

    try_all("goldens", path, spoil_json, attempt)


def _load(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


@pytest.mark.parametrize("name", ["step0.safetensors", "golden.json"])
def test_caches(case_file: Path, tmp_path: Path, try_all: Any, name: str) -> None:
    recipe = load_cases([case_file])[0].recipe.model_copy(update={"steps": 1})
    weight = torch.arange(24, dtype=torch.float64)
    with GoldenWriter(tmp_path / "g") as writer:
        for step in (-1, 0):
            writer.observe(step, "gradient", "w", weight, Region.whole((24,)))
        writer.finish(
            {"gradient": 1e-12}, {"losses": {"0/loss/total": 4.5}, "tensors": {"0/gradient/w": [3.0, 1.0]}}
        )
    file = tmp_path / "g" / name
    good = file.read_bytes()

    def attempt() -> str:
        if find_damage(recipe, tmp_path / "g"):
            return ""
        if name == "golden.json":
            return "" if json.loads(file.read_bytes()) == json.loads(good) else "damage is taken"
        return (
            ""
            if torch.equal(StoredGolden(tmp_path / "g").whole(0, "gradient/w"), weight)
            else "damage is taken"
        )

    try_all(
        f"cache {name}",
        file,
        spoil_bytes if name != "golden.json" else partial(spoil_json, seals=False),
        attempt,
    )


@pytest.fixture
def weights(invoke: Any, start: Path, tmp_path: Path) -> Path:
    """Return Hugging Face weights with their distributed checkpoint beside them."""
    done = invoke("convert", start, tmp_path / "hf", "--to", "hf", "--preset", "tiny-mixtral-8x7b")
    assert done.exit_code == 0, done.stderr
    done = invoke("convert", tmp_path / "hf", tmp_path / "dcp", "--to", "dcp")
    assert done.exit_code == 0, done.stderr
    return tmp_path


@pytest.mark.parametrize(
    ("folder", "name", "to"),
    [
        ("hf", "config.json", "dcp"),
        ("hf", "model.safetensors", "dcp"),
        ("dcp", ".metadata", "hf"),
        ("dcp", "model.json", "hf"),
        ("dcp", "__0_0.distcp", "hf"),
    ],
)
def test_weights(invoke: Any, weights: Path, try_all: Any, folder: str, name: str, to: str) -> None:
    file, destination = weights / folder / name, weights / "to"

    def attempt() -> str:
        shutil.rmtree(destination, ignore_errors=True)
        done = invoke("convert", weights / folder, destination, "--to", to, "--quiet")
        if done.exit_code and destination.exists():
            return "a part of the destination is there"
        return judge(done, (0, 2))

    try_all(f"{folder} {name}", file, spoil_json if name.endswith("json") else spoil_bytes, attempt)


SCRIPT = """
import torch
model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 2))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(2):
    optimizer.zero_grad()
    model(torch.arange(8)).square().sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return two recordings of one script."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "train.py").write_text(SCRIPT.replace("model =", "torch.manual_seed(0)\nmodel =", 1))
    command = [sys.executable, "-m", "moeverify", "watch", "--steps", "0-1", "--out", folder / "good", "--"]
    subprocess.run([*command, sys.executable, folder / "train.py"], check=True, capture_output=True)
    shutil.copytree(folder / "good", folder / "spoiled")
    return folder


@pytest.mark.parametrize("role", ["run", "trusted run", "noise"])
@pytest.mark.parametrize("name", ["rank0.jsonl", "rank0.bin"])
def test_recordings(invoke: Any, recorded: Path, try_all: Any, name: str, role: str) -> None:
    good, spoiled = recorded / "good", recorded / "spoiled"
    folders = {
        "run": (good, spoiled),
        "trusted run": (spoiled, good),
        "noise": (good, good, "--noise", spoiled),
    }
    spoil = spoil_bytes if name.endswith("bin") else spoil_lines
    words = ("compare", *folders[role], "--quiet")
    try_all(f"{role} {name}", spoiled / name, spoil, lambda: judge(invoke(*words), (0, 1, 2)))


@pytest.mark.parametrize("name", ["rank0.jsonl", "rank0.bin"])
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("nowhere")])
def test_recordings_that_are_no_files(
    invoke: Any, recorded: Path, tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    shutil.copytree(recorded / "good", tmp_path / "strange")
    (tmp_path / "strange" / name).unlink()
    make(tmp_path / "strange" / name)
    with impatience():
        done = invoke("compare", recorded / "good", tmp_path / "strange", "--quiet")
    assert not judge(done, (2,))


def test_manifests(tmp_path: Path, try_all: Any) -> None:
    box = Hyperrect((0,), (4,))
    tensor = StoredTensor("F32", (4,), (StoredChunk(box, "rank-0.bin", 0, 7),))
    manifest = Manifest({"step": 3}, {"rank-0.bin": StoredFile(16, 0, 7)}, {"w": tensor})
    file = tmp_path / MANIFEST
    file.write_text(write_manifest(manifest))

    def attempt() -> str:
        try:
            return "" if read_manifest(tmp_path) == manifest else "damage is taken"
        except FormatError:
            return ""

    try_all("manifest", file, spoil_json, attempt)


def test_traces(invoke: Any, tmp_path: Path, try_all: Any) -> None:
    trace = tmp_path / "load.trace"
    made = make_trace("zipf", seed=0, num_layers=2, num_experts=16, num_sources=4, num_steps=3)
    with TraceWriter(trace, made.header) as writer:
        for step, copies in zip(made.steps, made.copies, strict=True):
            writer.append(step, copies)
    words = ("place", trace, "--world-size", "4", "--slots", "6")
    try_all("trace", trace, spoil_bytes, lambda: judge(invoke(*words), (0, 2)))


def test_arrays_and_placements(invoke: Any, tmp_path: Path, try_all: Any) -> None:
    trace = tmp_path / "load.npy"
    np.save(trace, np.arange(3 * 2 * 8).reshape(3, 2, 8))
    placed = tmp_path / "placed.yaml"
    words = ("place", trace, "--world-size", "4", "--slots", "2")
    assert invoke(*words, "--save", placed).exit_code == 0
    try_all("array", trace, spoil_bytes, lambda: judge(invoke(*words), (0, 2)))
    try_all("placement", placed, spoil_yaml, lambda: judge(invoke(*words, "--current", placed), (0, 2)))
