"""`pytest cases/` as a user types it: in a separate process, with real ranks where cases run."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)  # several launches, on a machine that may be busy

# Writes to a file how often the ranks are started, and for which cases. AGENT starts them without new imports.
SPY = """\
from moeverify.pytest_plugin import runner
from moeverify.verification.launch import monitor

monitor.agent_command = lambda: AGENT

stream_cases = runner.stream_cases

def count(cases, options, on_event):
    with open("launches", "a") as file:
        file.write(" ".join(case.name for case in cases) + "\\n")
    return stream_cases(cases, options, on_event)

runner.stream_cases = count
"""
# Sums in another order are not bit-for-bit copies. Whether a loss is off by its last bit depends on the
# machine; some gradients always are.
STRICT = """\
recipe: tiny

layout:
  dp_shard: 2
checks:
  repeat: never
  skip: [loss]
  tolerance: {kind: exact}
"""
# As if `pytest` had the option --fault of `moeverify run`.
FAULTY = """
from dataclasses import replace
from moeverify.pytest_plugin import session

read_options = session._read_options
session._read_options = lambda config: replace(read_options(config), fault="suite_faults:round_frequencies")
"""
NARROW = """\
recipe: {base: tiny, name: tiny-bf16, precision: bfloat16}
layout: {dp_shard: 2}
checks: {repeat: never}
"""
# A bound of 50 % decides no loss and no gradient.
WIDE = """\
recipe: tiny
layout: {dp_shard: 2}
checks: {repeat: never, tolerance: {kind: fixed, rtol: 0.5, atol: 0.0}}
"""
# Several sessions in one process: what they import takes longer than what they collect.
COLLECT = """\
import json, sys
import pytest

for words in json.loads(sys.argv[1]):
    print("session", flush=True)
    pytest.main(["-p", "no:cacheprovider", "--collect-only", "-q", *words])
"""


@pytest.fixture
def project(tmp_path: Path, make_project: Callable[..., Any]) -> Any:
    made = make_project(tmp_path, "good", "left-out")
    made.write_case("strict", STRICT)
    (tmp_path / "cases" / "foreign.yaml").write_text("layout: page\nrecipes: []\n")
    write_conftest(made)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    (tmp_path / "test_other.py").write_text("def test_other(): pass\n")
    return made


def write_conftest(project: Any, more: str = "") -> None:
    text = SPY.replace("AGENT", repr(project.python.agent_command())) + more
    (project.folder / "conftest.py").write_text(text)


def run_pytest(project: Any, *words: str) -> Any:
    return project.do("-p", "no:cacheprovider", *words, module="pytest")


def read_launches(project: Any) -> list[str]:
    path = project.folder / "launches"
    return path.read_text().splitlines() if path.exists() else []


def test_workers_share_one_launch_and_a_failure_says_where_what_and_how_to_repeat(project: Any) -> None:
    done = run_pytest(project, "cases", "-n", "2", "-v", "-k", "not left-out", "--update-golden")
    assert done.code == 1, done
    assert read_launches(project) == ["good strict"]
    assert "1 failed, 1 passed" in done.out
    assert re.search(r"PASSED\S* cases/good\.yaml::good", done.out)
    head = re.search(r"^cases/strict\.yaml:3: mismatch: (.*)$", done.out, re.MULTILINE)
    assert head is not None, done.out
    assert "must be bitwise equal" in head[1]
    assert re.search(r"^strict  MISMATCH  2 ranks", done.out, re.MULTILINE)
    assert re.search(r"^    at        \[.*\]: expected .*, actual ", done.out, re.MULTILINE)
    assert "moeverify run cases/strict.yaml -k strict --out runs/strict" in done.out
    assert re.search(r"^mismatch gradient: \d+ tensors, worst .* / exact in ", done.out, re.MULTILINE)
    assert re.search(r"^recorded +golden/tiny\.cpu\.json$", done.out, re.MULTILINE)
    assert list(project.goldens) == ["tiny.cpu.json"]
    assert project.find_remains() == []


def test_what_bfloat16_hides_fails_with_what_float64_shows(project: Any) -> None:
    project.write_case("narrow", NARROW)
    write_conftest(project, FAULTY)
    project.variables["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
    )
    done = run_pytest(project, "cases", "-k", "narrow")
    assert done.code == 1, done
    assert read_launches(project) == ["narrow"]
    assert re.search(r"^cases/narrow\.yaml:2: mismatch: ", done.out, re.MULTILINE)
    assert "found in float64: in the case's own precision it is below the effect of rounding" in done.out
    words = ("--moeverify-no-escalate", "--moeverify-allow-undecided")
    alone = run_pytest(project, "cases/narrow.yaml", *words)
    assert alone.code == 0, alone
    assert "1 passed" in alone.out


def test_an_undecided_case_fails_unless_it_is_allowed(project: Any) -> None:
    project.write_case("wide", WIDE)
    done = run_pytest(project, "cases/wide.yaml")
    assert done.code == 1, done
    assert re.search(
        r"^cases/wide\.yaml:2: undecided: loss: \d+ of \d+ tensors decided at 20 %", done.out, re.M
    )
    assert "an error below 50 % (median, at most 50 %) may not have been seen" in done.out
    allowed = run_pytest(project, "cases/wide.yaml", "--moeverify-allow-undecided")
    assert allowed.code == 0, allowed
    assert "1 passed" in allowed.out


def test_goldens_in_continuous_integration(project: Any) -> None:
    (project.folder / "cases" / "foreign.yaml").unlink()
    (project.folder / "cases" / "strict.yaml").unlink()
    (project.folder / "golden").mkdir()
    (project.folder / "golden" / "old.cpu.json").write_text("{}")
    project.variables["CI"] = "true"
    done = run_pytest(project, "cases")
    assert done.code == 1, done
    assert read_launches(project) == ["good left-out"]
    assert "3 failed" in done.out
    assert re.search(
        r"^cases/good\.yaml:2: error: golden golden/tiny\.cpu\.json is not recorded; record it with "
        r"`moeverify golden cases/good\.yaml`$",
        done.out,
        re.MULTILINE,
    )
    assert "golden/old.cpu.json: unused: no case uses it" in done.out
    assert list(project.goldens) == ["old.cpu.json"]


def test_only_cases_are_collected_where_they_were_asked_for(project: Any) -> None:
    (project.folder / "golden").mkdir()
    (project.folder / "golden" / "old.cpu.json").write_text("{}")

    cases = [f"cases/{name}.yaml::{name}" for name in ("good", "left-out", "strict")]
    wanted = {
        ("cases",): [*cases, "cases::unused-goldens"],
        ("cases", "-k", "good"): cases[:1],
        ("cases/good.yaml",): cases[:1],
        ("cases/good.yaml::good",): cases[:1],
        (".",): [*cases, "test_other.py::test_other", "cases::unused-goldens"],
        (): ["test_other.py::test_other"],
    }
    (project.folder / "sessions.py").write_text(COLLECT)
    done = project.do(json.dumps(list(wanted)), module="sessions")
    _, *sessions = done.out.split("session\n")
    found = [[line for line in session.splitlines() if "::" in line] for session in sessions]
    assert dict(zip(wanted, found, strict=True)) == wanted, done
    assert read_launches(project) == []


def test_a_broken_file_fails_as_it_is_collected_with_all_its_problems(project: Any) -> None:
    project.write_case("broken", "recipee: tiny\nlayout:\n  tp: two\n  cpp: 2\n")
    project.write_case("twin", "name: good\nrecipe: tiny\n")
    (project.folder / "cases" / "bytes.yaml").write_bytes(b"recipe: tiny\nlayout: {}\n# \xff\n")
    done = run_pytest(project, "cases")
    assert done.code == 2
    for line in (
        "cases/broken.yaml:1: recipee: unknown field `recipee`; did you mean `recipe`?",
        "cases/broken.yaml:3: layout.tp: expected an integer",
        "cases/broken.yaml:4: layout.cpp: unknown field `cpp`; did you mean `pp`?",
        "cases/twin.yaml:1: name: the name `good` is also that of cases/good.yaml",
        "cases/bytes.yaml:3: this file is not UTF-8 text",
    ):
        assert f"\n{line}" in done.out
    assert read_launches(project) == []
