"""Every option of the schema has an implementation; an option without one is refused before anything runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from moeverify.cases import choice as choice_module
from moeverify.cases.choice import Modules, Row, Table, list_options
from moeverify.cases.schema import ContextParallel, Layout, Optimizer
from moeverify.cases.validation import rules
from moeverify.cases.validation.choices import CHOICES
from moeverify.cases.validation.rules import validate
from moeverify.faults.setting import make_case

ROOT = Path(__file__).parents[3]
CASE = "recipe: {model: {preset: stress}}\nlayout: {cp: 2, context_parallel: %s}\n"


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.path)
def test_every_option_has_an_implementation_that_explains_itself(choice: Any) -> None:
    options = list_options(choice.path)
    assert [option for option in options if not choice.has(option)] == []
    assert all(choice.explain(option).endswith(".") for option in options)


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.path)
def test_every_implementation_is_an_option(choice: Any) -> None:
    if isinstance(choice, Table):
        implemented = set(choice.rows)
    else:
        folder = ROOT / choice.package.replace(".", "/")
        implemented = {file.stem for file in folder.glob("*.py")} - {"__init__"}
    assert implemented == set(list_options(choice.path))


@pytest.mark.parametrize(("section", "prefix"), [(Layout, "layout"), (Optimizer, "recipe.optimizer")])
def test_every_field_with_options_is_a_choice(section: Any, prefix: str) -> None:
    hints = get_type_hints(section)
    paths = {f"{prefix}.{name}" for name, hint in hints.items() if get_origin(hint) is Literal}
    assert paths == {choice.path for choice in CHOICES if choice.path.startswith(f"{prefix}.")}
    assert all(len(get_args(hints[path.rpartition(".")[2]])) > 1 for path in paths)


def test_rules_of_an_option_are_tried_only_where_it_is_chosen() -> None:
    uneven = {"preset": "tiny-gpt", "model": {"num_heads": 6, "num_kv_heads": 3, "head_dim": 4}, "cp": 2}
    assert validate(make_case("gathered", **uneven)) == []
    [problem] = validate(make_case("traded", **uneven, context_parallel="alltoall"))
    assert problem.path == "layout.context_parallel"
    assert "num_kv_heads 3 is not divisible by cp 2" in problem.message


def test_a_missing_implementation_is_one_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    empty: Table[Row] = Table("layout.context_parallel", "moeverify.nowhere", {})
    others = [choice for choice in CHOICES if choice.path != empty.path]
    monkeypatch.setattr(rules, "CHOICES", (*others, empty))
    monkeypatch.setattr(choice_module, "list_options", lambda path: ("allgather",))
    [problem] = validate(
        make_case("gathered", cp=3)
    )  # a row of 16 cannot be cut into 6, which is not reported now
    assert problem.path == "layout.context_parallel"
    assert problem.message == "`allgather` has no implementation: it would be in moeverify/nowhere.py"


def test_what_has_no_implementation_is_not_found() -> None:
    with pytest.raises(
        KeyError, match=r"layout.attention `flash` .* moeverify/model/attention_cores/flash.py"
    ):
        Modules("layout.attention", "moeverify.model.attention_cores").find("flash")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the package whose schema has one more kind of context parallelism."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "moeverify", folder / "moeverify", ignore=shutil.ignore_patterns("__pycache__"))
    schema = folder / "moeverify" / "cases" / "schema.py"
    text = schema.read_text()
    options = ", ".join(f'"{option}"' for option in get_args(ContextParallel))
    assert options in text
    schema.write_text(text.replace(options, f'{options}, "spiral"'))
    return folder


def check(folder: Path, option: str) -> subprocess.CompletedProcess[str]:
    (folder / "case.yaml").write_text(CASE % option)
    command = [sys.executable, "-m", "moeverify", "check", "case.yaml"]
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        command, cwd=folder, env={"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )


def test_an_option_without_code_is_refused_by_check(copy: Path) -> None:
    done = check(copy, "spiral")
    assert done.returncode == 2, done.stderr
    told = " ".join(done.stderr.split())
    assert "case.yaml:2: layout.context_parallel" in told
    assert "`spiral` has no implementation" in told
    assert "moeverify/parallel/context_parallel/spiral.py" in told
    known = ", ".join(f"`{option}`" for option in get_args(ContextParallel))
    assert f"choose from {known}, or write it" in told


def test_the_other_options_go_on_working(copy: Path) -> None:
    done = check(copy, "alltoall")
    assert (done.returncode, done.stderr) == (0, "")


def test_an_option_with_its_file_is_taken(copy: Path) -> None:
    package = copy / "moeverify" / "parallel" / "context_parallel"
    shutil.copy(package / "allgather.py", package / "spiral.py")
    done = check(copy, "spiral")
    assert (done.returncode, done.stderr) == (0, "")
    assert "cp 2 spiral" in done.stdout


def test_asking_all_rules_imports_no_torch() -> None:
    code = (
        "import sys; from moeverify.cases.validation.choices import CHOICES, list_chosen\n"
        "from moeverify.cases.choice import list_options\n"
        "from moeverify.cases.validation.reference import render_page, make_json_schema\n"
        "found = [choice.find(option) for choice in CHOICES for option in list_options(choice.path)]\n"
        "render_page(), make_json_schema()\n"
        "sys.exit('torch' in sys.modules or not found)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0
