"""The file of `--json`: one for each command, of the published schema, and after an error too."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from moeverify.cli import COMMANDS, build_app
from moeverify.cli.context import open_context
from moeverify.cli.reply import Reply, replying
from moeverify.errors import CaseError, Problem, RankFailure
from moeverify.report.formats.json import read_run
from moeverify.report.results_schema import make_results_schema
from moeverify.results.answer import CommandAnswer, CommandFacts
from moeverify.results.brief import MOST_BYTES
from moeverify.verification.controller import run

Invoke = Callable[..., Any]

TEXT = {"explain", "schema", "skill", "serve", "watch"}
"""Commands without `--json`: their output is a text, or already a file for programs."""


def list_commands() -> dict[str, Any]:
    app: Any = typer.main.get_command(build_app())
    commands = {name: app.commands[name] for name in COMMANDS if name != "faults"}
    return commands | {f"faults {name}": each for name, each in app.commands["faults"].commands.items()}


def read(file: Path) -> dict[str, Any]:
    """Return the content of a file, which has all keys of the schema and no others."""
    text = file.read_text()
    assert CommandAnswer.model_validate_json(text).model_dump_json(indent=2) + "\n" == text
    content: dict[str, Any] = json.loads(text)
    return content


def test_every_other_command_has_the_option() -> None:
    without = {
        name
        for name, each in list_commands().items()
        if not any(opt == "--json" for option in each.params for opt in option.opts)
    }
    assert without == TEXT


@pytest.mark.parametrize("name", list_commands())
def test_bad_usage_of_every_command_is_answered(name: str, invoke: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    done = invoke(*name.split(), f"--json={file}", "--no-such-option")
    assert (done.exit_code, done.stdout) == (2, "")
    content = read(file)
    assert (content["command"], content["status"], content["exit_code"]) == (name, "bad-input", 2)
    (problem,) = content["problems"]
    assert problem["path"] in ("--no-such-option", "--json")
    assert "No such option" in problem["message"]
    assert [each["command"] for each in content["next"]] == [f"moeverify {name} --help"]


@pytest.mark.parametrize(
    ("words", "command", "path", "message"),
    [
        (["run", "--device", "gpu"], "run", "--device", "Invalid value for '--device': 'gpu' is not one of"),
        (["report"], "report", "RUN", "Missing argument 'RUN'."),
        (["chek"], "", "", "No such command 'chek'. Did you mean 'check'"),
        (["faults", "rnu"], "faults", "", "No such command 'rnu'."),
        (["diff", "a", "b", "--factor", "1e300"], "diff", "--factor", "is not a number"),
    ],
)
def test_bad_usage_names_the_parameter(
    words: list[str], command: str, path: str, message: str, invoke: Invoke, tmp_path: Path
) -> None:
    assert invoke(*words, "--json", tmp_path / "out.json").exit_code == 2
    content = read(tmp_path / "out.json")
    assert (content["command"], content["problems"][0]["path"]) == (command, path)
    assert message in content["problems"][0]["message"]


def test_words_of_another_program_are_no_options(invoke: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    assert invoke("watch", "--none", "--", "train", "--json", file).exit_code == 2
    assert invoke("check", "--json").exit_code == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "file", "line", "path", "message"),
    [
        (["run", "{0}/none.yaml"], "{0}/none.yaml", None, "", "there is no such file"),
        (["reshard", "{0}/bad.yaml"], "{0}/bad.yaml", 1, "recipe", "expected a recipe"),
        (["report", "{0}/cut.json"], "{0}/cut.json", 2, "", "not valid JSON"),
        (["report", "{0}/run.json"], "{0}/run.json", 2, "verdict", "Input should be"),
        (["compare", "{0}/a", "{0}/b"], "", None, "", "is no folder"),
        (["operators", "{0}/none"], "{0}/none", None, "", "there is no such file"),
    ],
)
def test_bad_input_of_commands_with_results_is_answered(
    words: list[str],
    file: str,
    line: int | None,
    path: str,
    message: str,
    invoke: Invoke,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "bad.yaml").write_text("recipe: 3\n")
    (tmp_path / "cut.json").write_text("{\n")
    (tmp_path / "run.json").write_text('{"schema_version": 1,\n"verdict": "maybe"}\n')
    monkeypatch.setattr(sys, "argv", ["moeverify", words[0], "a b"])
    done = invoke(*(word.format(tmp_path) for word in words), "--json", tmp_path / "out.json")
    assert (done.exit_code, done.stdout) == (2, "")
    content = read(tmp_path / "out.json")
    assert (content["command"], content["status"]) == (words[0], "bad-input")
    problem = content["problems"][0]
    assert (problem["file"], problem["line"], problem["path"]) == (file.format(tmp_path), line, path)
    assert message in problem["message"]
    assert problem["remedy"]
    assert [each["command"] for each in content["next"]] == [f"moeverify {words[0]} 'a b'"]


@pytest.mark.parametrize(
    "words", [["run", "{}.yaml"], ["report", "{}"], ["explain", "{}"], ["run", "--none={}"]]
)
def test_errors_replace_the_short_json(words: list[str], invoke: Invoke) -> None:
    done = invoke(
        *(word.format("\N{LATIN SMALL LETTER E WITH ACUTE}" * 90) for word in words), "--json-brief"
    )
    assert done.exit_code == 2
    content = CommandAnswer.model_validate_json(done.stdout)
    assert content.command == words[0]
    assert content.problems


def test_many_problems_make_a_short_answer(capsys: pytest.CaptureFixture[str]) -> None:
    problems = [
        Problem("wrong " * 400, f"{number}.yaml", number, remedy="right " * 400) for number in range(40)
    ]
    with pytest.raises(typer.Exit), replying(Reply("run", is_brief=True)), open_context():
        raise CaseError(problems)
    text = capsys.readouterr().out
    assert len(text.encode()) <= MOST_BYTES
    assert [each.line for each in CommandAnswer.model_validate_json(text).problems] == [0, 1, 2, 3]


def test_the_results_of_a_run_that_ended_early_stay(
    invoke: Invoke, case_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RankFailure("rank 1 was killed")

    monkeypatch.setattr(run, "run_cases", fail)
    done = invoke("run", case_file, "--json", tmp_path / "out.json", "--json-brief")
    assert done.exit_code == 3
    assert read_run(tmp_path / "out.json").cases[0].reason == "the run ended early: rank 1 was killed"
    assert [case["verdict"] for case in json.loads(done.stdout)["cases"]] == ["skipped"]


def test_an_answer_is_no_run(invoke: Invoke, tmp_path: Path) -> None:
    invoke("run", tmp_path / "none.yaml", "--json", tmp_path / "out.json")
    done = invoke("report", tmp_path / "out.json")
    assert done.exit_code == 2
    assert "`moeverify run` ended before it had a run" in " ".join(done.stderr.split())


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
    with pytest.raises(typer.Exit), replying(reply), open_context():
        raise error
    content = read(tmp_path / "out.json")
    assert (content["exit_code"], content["status"]) == (code, status)
    assert [each["message"] for each in content["problems"]] == ([] if message is None else [message])


def test_a_document_is_written_after_a_signal(tmp_path: Path) -> None:
    reply = Reply("doctor", tmp_path / "out.json")
    reply.document = "{}\n"
    with pytest.raises(typer.Exit) as caught, replying(reply), open_context():
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
    with replying(Reply("comm", tmp_path / "out.json")), open_context():
        pass
    assert not (tmp_path / "out.json").exists()


def test_the_schema_has_the_facts_of_every_command() -> None:
    definitions = make_results_schema()["$defs"]
    named = {
        each["$ref"].rpartition("/")[2]
        for each in definitions["CommandAnswer"]["properties"]["facts"]["anyOf"][:-1]
    }
    assert named == {each.__name__ for each in CommandFacts.__args__}
