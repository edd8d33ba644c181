"""The file of `--json`: one for each command, of the published schema, and after an error too."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from moeverify.cli import COMMANDS, build_app
from moeverify.cli.context import open_context
from moeverify.cli.reply import Reply
from moeverify.errors import CaseError, Problem, RankFailure
from moeverify.report.results_schema import make_results_schema
from moeverify.results.answer import CommandAnswer, CommandFacts

Invoke = Callable[..., Any]

TEXT = {"schema", "skill", "serve", "watch"}
"""Commands without `--json`: their output is a text, or already a file for programs."""


def read(file: Path) -> dict[str, Any]:
    """Return the content of a file, which has all keys of the schema and no others."""
    text = file.read_text()
    assert CommandAnswer.model_validate_json(text).model_dump_json(indent=2) + "\n" == text
    content: dict[str, Any] = json.loads(text)
    return content


def test_every_other_command_has_the_option() -> None:
    app: Any = typer.main.get_command(build_app())
    commands = {name: app.commands[name] for name in COMMANDS if name != "faults"}
    commands |= {f"faults {name}": each for name, each in app.commands["faults"].commands.items()}
    without = {
        name
        for name, each in commands.items()
        if not any(opt.startswith("--json") for option in each.params for opt in option.opts)
    }
    assert without == TEXT


@pytest.mark.parametrize(
    ("words", "facts", "next_"),
    [
        (["check"], "cases", "run"),
        (["mesh", "--ranks-per-node", 1], "meshes", "run"),
    ],
)
def test_a_case_is_described(
    words: list[Any], facts: str, next_: str, invoke: Invoke, case_file: Path, tmp_path: Path
) -> None:
    file = tmp_path / "out.json"
    done = invoke(*words, case_file, "--set", "layout.tp=2", "--json", file)
    assert done.exit_code == 0, done.output
    content = read(file)
    assert (content["command"], content["status"], content["exit_code"]) == (words[0], "pass", 0)
    (found,) = content["facts"][facts]
    assert found["name"] == "fsdp2-2"
    assert found["ranks"] == 4 if facts == "cases" else len(found["ranks"]) == 4
    assert [each["command"] for each in content["next"]] == [
        f"moeverify {next_} {case_file} --set layout.tp=2"
    ]


@pytest.mark.parametrize("command", ["list", "show"])
def test_faults_are_listed(command: str, invoke: Invoke, tmp_path: Path) -> None:
    assert invoke("faults", command, "A05", "--json", tmp_path / "out.json").exit_code == 0
    content = read(tmp_path / "out.json")
    assert content["command"] == f"faults {command}"
    assert [each["number"] for each in content["facts"]["faults"]] == ["A05"]
    assert [each["command"] for each in content["next"]] == ["moeverify faults run A05"]


def test_kept_runs_are_compared_and_listed(invoke: Invoke, keep: Callable[..., Path], tmp_path: Path) -> None:
    before, after = keep("a"), keep("b", "mismatch", error=0.5)
    (tmp_path / "cut.json").write_text("{")
    file = tmp_path / "out" / "told.json"
    file.parent.mkdir()
    assert invoke("diff", before, after, "--json", file).exit_code == 1
    assert read(file)["status"] == "mismatch"
    assert {"kind": "verdict", "subject": "fsdp2-2", "before": "pass", "after": "mismatch"} in read(file)[
        "facts"
    ]["changes"]
    assert invoke("history", tmp_path, "--json", file).exit_code == 2
    facts = read(file)["facts"]
    assert [(each["name"], each["verdict"]) for each in facts["runs"]] == [("a", "pass"), ("b", "mismatch")]
    assert "cut.json" in facts["left_out"][0]


def test_a_conversion_is_counted(invoke: Invoke, start: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    words = ("convert", start, tmp_path / "hf", "--to", "hf", "--json", file, "-q")
    refused = invoke(*words)
    assert refused.exit_code == 2
    assert read(file)["status"] == "bad-input"
    assert read(file)["facts"] is None
    assert read(file)["problems"][0]["message"] in " ".join(refused.stderr.split())
    assert invoke(*words, "--preset", "tiny-mixtral-8x7b").exit_code == 0
    assert read(file)["facts"]["num_tensors"] > 10
    assert read(file)["problems"] == []


@pytest.mark.parametrize(
    ("error", "code", "status", "message"),
    [
        (CaseError([Problem("wrong", "a.yaml", 3, "layout.tp", "be right")]), 2, "bad-input", "wrong"),
        (RankFailure("rank 3 hung"), 3, "error", "rank 3 hung"),
        (ZeroDivisionError("oops"), 3, "error", "oops"),
        (OSError(28, "No space left on device"), 3, "error", "[Errno 28] No space left on device"),
        (typer.Exit(1), 1, "mismatch", None),
        (typer.Exit(4), 4, "undecided", None),
        (KeyboardInterrupt(), 130, "interrupted", "KeyboardInterrupt"),
    ],
)
def test_the_end_of_a_command_is_written(
    error: BaseException, code: int, status: str, message: str | None, tmp_path: Path
) -> None:
    reply = Reply("check", tmp_path / "out.json")
    with pytest.raises(typer.Exit), open_context(reply):
        raise error
    content = read(tmp_path / "out.json")
    assert (content["exit_code"], content["status"]) == (code, status)
    assert [each["message"] for each in content["problems"]] == ([] if message is None else [message])


def test_a_document_is_written_after_a_signal(tmp_path: Path) -> None:
    reply = Reply("doctor", tmp_path / "out.json")
    reply.document = "{}\n"
    with pytest.raises(typer.Exit) as caught, open_context(reply):
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.exit_code == 143
    assert (tmp_path / "out.json").read_text() == "{}\n"


def test_a_file_that_cannot_be_written_is_refused_first(
    invoke: Invoke, case_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    done = invoke("check", case_file, "--json", tmp_path / "file" / "out.json")
    assert done.exit_code == 2
    assert "cannot write" in done.stderr
    assert done.stdout == ""


def test_only_the_first_rank_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with open_context(Reply("comm", tmp_path / "out.json")):
        pass
    assert not (tmp_path / "out.json").exists()


def test_the_schema_has_the_facts_of_every_command() -> None:
    definitions = make_results_schema()["$defs"]
    named = {
        each["$ref"].rpartition("/")[2]
        for each in definitions["CommandAnswer"]["properties"]["facts"]["anyOf"][:-1]
    }
    assert named == {each.__name__ for each in CommandFacts.__args__}
