"""Arguments within limits, patterns of any shape, and signals while a report is written."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from moeverify.cli.bounds import find_problem
from moeverify.cli.context import postponed_signals
from moeverify.report.formats import markdown


@pytest.mark.parametrize(
    "value",
    [
        *(float("nan"), float("inf"), -float("inf"), 1e300, 2**63, -(2**70), "a\0b", "x" * 200_000),
        *(Path("a\0"), Path("n" * 256), Path("n/" * 3000), [1, 2, 2**64], ("a", ["\0"])),
    ],
    ids=range(13),
)
def test_a_value_beyond_a_limit_is_named(value: Any) -> None:
    assert find_problem(value)


@pytest.mark.parametrize(
    "value", [0, -1, 2**63 - 1, 1e12, 0.0, True, None, "x" * 9000, Path("a/b"), ["a"], []]
)
def test_a_value_within_the_limits_is_fine(value: Any) -> None:
    assert not find_problem(value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "CASE", "--timeout", "inf"), "--timeout"),
        (("convert", "weights", "made", "--to", "hf", "--shard-size", "inf"), "--shard-size"),
        (("watch", "--out", "new", "--limit", "1e300", "--", "true"), "--limit"),
        (("mesh", "CASE", "--ranks-per-node", "9" * 30), "--ranks-per-node"),
        (("check", "n" * 5000), "5000 bytes"),
        (("watch", "--out", "new", "--steps", "9" * 5000, "--", "true"), "no range of steps"),
        (("check", "CASE", "-k", "(" * 5000), "more than 50 `(`"),
        (("check", "CASE", "-k", "not " * 5000), "expected a word, got the end"),
        (("faults", "list", "-k", "(" * 5000), "more than 50 `(`"),
        (("run", "CASE", "--device", "\x9b" * 5000), "is not one of"),
    ],
    ids=range(10),
)
def test_a_bad_argument_is_bad_usage(
    invoke: Any, case_file: Path, words: tuple[str, ...], message: str
) -> None:
    done = invoke(*(case_file if word == "CASE" else word for word in words))
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert len(done.stderr) < 2000
    assert "\x9b" not in done.stderr


def test_a_long_pattern_selects(invoke: Any, case_file: Path) -> None:
    for pattern in ("x or " * 3000 + "fsdp2", "not " * 4000 + "fsdp2", "(" * 50 + "fsdp2" + ")" * 50):
        done = invoke("check", case_file, "-k", pattern)
        assert (done.exit_code, "1 case" in done.stdout) == (0, True), done.output


def test_an_interrupt_while_the_report_is_written_loses_nothing(
    invoke: Any, keep: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = markdown.write

    def interrupted(run: Any, path: Path) -> None:
        signal.raise_signal(signal.SIGINT)
        write(run, path)

    monkeypatch.setattr(markdown, "write", interrupted)
    kept = keep("run", "mismatch", 1.0)
    files = {name: tmp_path / f"r.{name}" for name in ("markdown", "csv", "json")}
    words = [word for name, path in files.items() for word in (f"--{name}", path)]
    done = invoke("report", kept, *words)
    assert done.exit_code == 130
    assert "interrupted" in done.stderr
    assert "fsdp2-2  MISMATCH" in done.stdout
    assert all(path.stat().st_size for path in files.values())
    assert json.loads(files["json"].read_text())["verdict"] == "mismatch"


def test_a_second_interrupt_takes_effect_at_once() -> None:
    reached = []

    def report() -> None:
        with postponed_signals():
            for number in (1, 2):
                signal.raise_signal(signal.SIGINT)
                reached.append(number)

    with pytest.raises(KeyboardInterrupt):
        report()
    assert reached == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
