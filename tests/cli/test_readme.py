"""README and docs name existing commands, options, fields, files and links."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from ruamel.yaml import YAML
from typer.testing import CliRunner

from moeverify.cases.validation.load import load_cases
from moeverify.cli import EXAMPLES, build_app
from moeverify.results.culprit import Mechanism
from moeverify.results.finding import CheckResult, Finding, FollowUp, Worst
from moeverify.results.place import Place
from moeverify.results.run import CaseResult, RankReport, RunResult
from moeverify.verification.controller.init_files import WORKFLOW

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
REFERENCE = (DOCS / "reference" / "case.md").read_text()
ROOT_PAGES = [ROOT / f"{name}.md" for name in ("README", "AGENTS", "CHANGELOG", "CONTRIBUTING", "SECURITY")]
SKILL = ROOT / "moeverify" / "cli" / "SKILL.md"
PAGES = [*ROOT_PAGES, SKILL, *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("re*/*.md"))]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
JOBS = sorted((ROOT / "examples" / "slurm").glob("*.sh"))
STARTED = {file.name: file.read_text() for file in (*WORKFLOWS, *JOBS)} | {"init": WORKFLOW}
COMMANDS: dict[str, Any] = typer.main.get_command(build_app()).commands  # type: ignore[attr-defined]


def list_options(command: Any) -> set[str]:
    """Return the options of a command and of its subcommands."""
    own = {name for parameter in command.params for name in [*parameter.opts, *parameter.secondary_opts]}
    inner = [list_options(sub) for sub in getattr(command, "commands", {}).values()]
    return {name for name in own.union(*inner) if name.startswith("-")} | {"--help", "-h"}


def list_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each `moeverify` command line in a code block or code span."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    for line in [*lines, *spans]:
        found = re.match(r"(?:torchrun .* -m |srun )?moeverify (?=[a-z])(.*)", line)
        if found:
            yield shlex.split(found[1], comments=True)


def list_headings(path: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        path = page.parent / file if file else page
        assert path.exists(), target
        assert not anchor or anchor in list_headings(path), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_exist(page: Path) -> None:
    for words in list_commands(page.read_text()):
        assert words[0] in COMMANDS, words
        known = list_options(COMMANDS[words[0]])
        own = words[1 : words.index("--")] if "--" in words else words[1:]  # the rest is the user's command
        assert {word for word in own if word.startswith("-")} <= known, words


@pytest.mark.parametrize("name", STARTED)
def test_workflows_and_jobs_use_commands_and_options_that_exist(name: str) -> None:
    lines = re.sub(r"^ *#.*", "", STARTED[name].replace("\\\n", " "), flags=re.MULTILINE)
    commands = re.findall(r"(?<![\w/-])moeverify ([a-z]+)\b(.*)", lines)
    assert commands or name in ("pages.yml", "release.yml")
    for command, rest in commands:
        options = re.findall(r"(?<=\s)--?[a-z][\w-]*", rest)
        assert set(options) <= list_options(COMMANDS[command]), rest


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_workflows_use_files_that_exist(file: Path) -> None:
    jobs = YAML(typ="safe").load(file)["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    assert all(("run" in step) != ("uses" in step) for step in steps)
    for path in re.findall(r"(?<!\S)\.ci/\w+", "\n".join(step.get("run", "") for step in steps)):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("file", JOBS, ids=lambda file: file.name)
def test_jobs_are_scripts_of_bash(file: Path) -> None:
    assert subprocess.run(["bash", "-n", file], check=False).returncode == 0


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_help_of_each_command_has_one_example_with_options_that_exist(name: str) -> None:
    (words,) = list_commands(f"`moeverify {EXAMPLES[name]}`")
    own = words[: words.index("--")] if "--" in words else words  # the rest is the user's command
    command, *rest = name.split()
    found = COMMANDS[command].commands[rest[0]] if rest else COMMANDS[command]
    assert words[: len(rest) + 1] == [command, *rest]
    assert {word for word in own if word.startswith("-")} <= list_options(found)
    shown = CliRunner().invoke(build_app([command]), [*name.split(), "--help"]).stdout
    assert shown.count("Example: ") == 1
    assert f"Example: moeverify {EXAMPLES[name]}" in shown


def test_every_command_has_an_example() -> None:
    inner = {f"{name} {each}" for name in COMMANDS for each in getattr(COMMANDS[name], "commands", ())}
    assert set(EXAMPLES) == set(COMMANDS) | inner


def test_every_page_is_linked_from_readme_or_another() -> None:
    pages = {page for page in PAGES if page.parent != ROOT}
    linked = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in PAGES
        for target in re.findall(r"\]\(([^):]+)\)", page.read_text())
    }
    assert pages <= linked


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_files_and_packages_that_are_named_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for path in re.findall(r"`((?:moeverify|multiprocessing_pdb|tests|cases|examples|docs)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path


def test_make_targets_exist() -> None:
    rules = (ROOT / "Makefile").read_text()
    typed = re.compile(r"`make ([a-z-]+)[ `]|^make ([a-z-]+)(?= *#|$)", re.MULTILINE)
    named = {max(found) for page in PAGES for found in typed.findall(page.read_text())}
    assert {"verify", "test", "test-fast", "lint", "megablocks", "samples"} <= named
    for target in named:
        assert re.search(rf"^{target}:", rules, re.MULTILINE), target


def test_keys_that_are_explained_are_keys_of_the_json() -> None:
    models = (RunResult, CaseResult, CheckResult, Worst, Finding, FollowUp, Place, RankReport)
    text = (DOCS / "reports.md").read_text()
    rows = re.findall(
        r"^\| ((?:`\w+`(?:, )?)+) \|", text.partition("<!-- end of sample -->")[2], re.MULTILINE
    )
    explained = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(explained) > 20
    written = {
        field.serialization_alias or name for model in models for name, field in model.model_fields.items()
    }
    assert explained <= written | {"checksum"}  # of the whole file


@pytest.mark.parametrize("layout", re.findall(r"`(\{[a-z_]+: [^`]+\})`", (DOCS / "layouts.md").read_text()))
def test_layouts_are_valid(layout: str, tmp_path: Path) -> None:
    (tmp_path / "case.yaml").write_text(
        f"recipe: {{model: {{preset: stress}}, data: {{batch: 16}}}}\nlayout: {layout}\n"
    )
    assert load_cases([tmp_path / "case.yaml"])[0].layout.world_size > 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_are_shown_as_they_are(page: Path) -> None:
    for path, text in re.findall(r"^```yaml\n# (\S+)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        assert (ROOT / path).read_text() == text


def test_each_mechanism_is_in_the_table_of_the_page_on_causes() -> None:
    table = (DOCS / "diagnosis.md").read_text().partition("| `mechanism` |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", table, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(get_args(Mechanism))


def test_the_answers_of_the_page_on_the_architecture_name_functions_of_their_files() -> None:
    page = (DOCS / "architecture.md").read_text()
    answers = re.findall(r"^\| \w.*\? \| (.*`.*) \|$", page, re.MULTILINE)
    assert len(answers) >= 8
    for answer in answers:
        folder, names, text = Path(), [], ""
        for name in re.findall(r"`(?:moeverify/)?([\w./]+)`", answer):
            if "/" in name or name.endswith(".py"):
                place = (ROOT / "moeverify" if "/" in name else folder) / name
                folder = place.parent
                text += (place / "__init__.py" if place.is_dir() else place).read_text()
            else:
                names += name.split(".")
        for name in names:
            assert re.search(rf"^(?: *(?:def|class) {name}\b|{name} = )", text, re.MULTILINE), (name, answer)
