"""Commands that read cases, and their messages for bad input."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


def test_check_prints_a_line_a_case(invoke: Any, case_file: Path) -> None:
    result = invoke("check", case_file)
    assert result.exit_code == 0
    assert re.search(r"^fsdp2-2 +2 +fsdp2 2 +\S", result.stdout, re.MULTILINE)
    assert result.stdout.splitlines()[-1] == "1 case, 1 recipe, at most 2 ranks"


def test_check_takes_overrides_and_patterns(invoke: Any, case_file: Path) -> None:
    result = invoke("check", case_file, "--set", "layout.dp_shard=4", "-k", "fsdp2 and not tp")
    assert result.exit_code == 0
    assert "at most 4 ranks" in result.stdout
    assert invoke("check", case_file, "-k", "nothing").exit_code == 2


def test_all_problems_are_told_at_once(invoke: Any, case_file: Path) -> None:
    text = case_file.read_text().replace("dp_shard", "dp_shart").replace("hidden: 32", "hidden: many")
    case_file.write_text(text)
    result = invoke("check", case_file)
    assert result.exit_code == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert any(line.startswith(f"{case_file}:5: recipe.model.hidden: ") for line in lines)
    assert any(line.startswith(f"{case_file}:12: layout.dp_shart: ") for line in lines)
    assert any(line.startswith("    ") and "dp_shard" in line for line in lines)
    assert lines[-1] == "2 problems"


def test_run_checks_its_files_before_anything_else(invoke: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    places = ["--json", tmp_path / "file" / "a.json", "--junit", tmp_path, "--out", tmp_path / "file"]
    result = invoke("run", tmp_path / "no-such-case.yaml", *places)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == "3 problems"
    assert "no-such-case" not in result.stderr


def test_run_of_a_bad_case_is_usage(invoke: Any, tmp_path: Path) -> None:
    result = invoke("run", tmp_path / "no-such-case.yaml", "--junit", tmp_path / "new" / "a.xml")
    assert result.exit_code == 2
    assert "no-such-case.yaml" in result.stderr
    assert not (tmp_path / "new" / "a.xml").exists()


def test_unknown_words_are_usage(invoke: Any) -> None:
    assert invoke("walk").exit_code == 2
    assert invoke("run").exit_code == 2
    assert invoke("run", "x.yaml", "--device", "tpu").exit_code == 2


def test_only_the_first_of_several_ranks_prints(invoke: Any, case_file: Path, monkeypatch: Any) -> None:
    for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        with monkeypatch.context() as patch:
            patch.setenv(size, "2")
            patch.setenv(rank, "0")
            assert "1 case" in invoke("check", case_file).stdout
            patch.setenv(rank, "1")
            other = invoke("check", case_file)
            assert (other.exit_code, other.output) == (0, "")
            patch.setenv(size, "1")
            assert "1 case" in invoke("check", case_file).stdout


def run_alone(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# Run the command line and fail if it has loaded one of the slow modules.
GUARD = """
import sys
import pytest

from moeverify.cli import main
try:
    main()
except SystemExit as end:
    code = end.code
loaded = sorted({name.split(".")[0] for name in sys.modules} & {FORBIDDEN})
sys.exit(f"loaded {loaded}" if loaded else code)
"""


def test_check_does_not_load_torch(case_file: Path) -> None:
    code = GUARD.replace("FORBIDDEN", "'torch', 'numpy', 'jinja2', 'matplotlib'")
    done = run_alone(code, "check", str(case_file))
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 case" in done.stdout


def test_a_command_does_not_load_the_others(case_file: Path) -> None:
    code = GUARD.replace('name.split(".")[0] for name in sys.modules', "name for name in sys.modules")
    others = "'moeverify.cli.run', 'moeverify.cli.comm'"
    done = run_alone(code.replace("FORBIDDEN", others), "check", str(case_file))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["check", "mesh"])
def test_what_runs_nothing_does_not_load_the_results_of_runs(command: str, case_file: Path) -> None:
    code = GUARD.replace('name.split(".")[0] for name in sys.modules', "name for name in sys.modules")
    done = run_alone(code.replace("FORBIDDEN", "'moeverify.results.finding'"), command, str(case_file))
    assert (done.returncode, done.stderr) == (0, "")


def test_reports_do_not_load_torch(keep: Any, tmp_path: Path) -> None:
    code = GUARD.replace("FORBIDDEN", "'torch', 'numpy', 'matplotlib'")
    words = ["report", str(keep("a")), "--csv", str(tmp_path / "a.csv"), "--junit", str(tmp_path / "a.xml")]
    done = run_alone(code, *words)
    assert (done.returncode, done.stderr) == (0, "")
    words = [
        "report",
        str(keep("a")),
        "--html",
        str(tmp_path / "a.html"),
        "--plots",
        str(tmp_path / "plots"),
        "-q",
    ]
    done = run_alone(GUARD.replace("FORBIDDEN", "'torch', 'pyplot'"), *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "plots").is_dir()
    done = run_alone(code, "diff", str(keep("a")), str(keep("b")))
    assert (done.returncode, done.stderr) == (0, "")


def test_help_loads_nothing_heavy() -> None:
    code = GUARD.replace("FORBIDDEN", "'torch', 'numpy', 'jinja2', 'ruamel'")
    without_pydantic = GUARD.replace("FORBIDDEN", "'torch', 'numpy', 'jinja2', 'ruamel', 'pydantic'")
    for words in (["--help"], ["run", "--help"], ["--version"]):
        done = run_alone(code if "run" in words else without_pydantic, *words)
        assert (done.returncode, done.stderr) == (0, "")
        assert "moeverify" in done.stdout


def test_no_module_of_report_loads_torch() -> None:
    code = (
        "import importlib, pkgutil, sys, moeverify.report as r\n"
        "names = [m.name for m in pkgutil.iter_modules(r.__path__)]\n"
        "[importlib.import_module('moeverify.report.' + n) for n in names]\n"
        "assert len(names) > 10, names\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = run_alone(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_check_names_a_function_that_is_missing_and_imports_none(invoke: Any, tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text("def make(): ...\nraise SystemExit('it was imported')\n")
    case = tmp_path / "case.yaml"
    for name in ("make", "makes"):
        model = f"{{factory: 'theirs:{name}', vocab_size: 16}}"
        case.write_text(
            f"recipe: {{model: {model}, data: {{batch: 4, seq_len: 8}}}}\nlayout: {{dp_replicate: 2}}\n"
        )
        done = invoke("check", case)
        if name == "make":
            assert done.exit_code == 0
    assert done.exit_code == 2
    assert f"{case}: recipe.model.factory: `theirs` ({tmp_path}/theirs.py) has no `makes`" in done.stderr
    assert "did you mean `make`?" in done.stderr
