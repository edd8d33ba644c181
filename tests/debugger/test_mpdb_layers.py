"""The debugger's layers: it depends on no other package, and its two sides share only the wire protocol."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from debugger_site import ROOT

PACKAGE = ROOT / "multiprocessing_pdb"
ALLOWED = {"wire": {"wire"}, "rank": {"rank", "wire"}, "console": {"console", "wire"}}
OPTIONAL = {"tabulate", "pdbpp", "pdb", "IPython", "traitlets", "torch", "numpy"}  # traitlets is IPython's


def list_imports(path):
    """Yield the name of every module that a file imports, lazily or not."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, path
            yield node.module


@pytest.mark.parametrize("side", sorted(ALLOWED))
def test_a_side_imports_itself_and_the_wire_only(side):
    for path in (PACKAGE / side).rglob("*.py"):
        for name in list_imports(path):
            root, _, rest = name.partition(".")
            if root == "multiprocessing_pdb":
                assert rest.partition(".")[0] in ALLOWED[side], f"{path} imports {name}"


def test_nothing_else_is_needed():
    for path in PACKAGE.rglob("*.py"):
        for name in list_imports(path):
            root = name.partition(".")[0]
            known = root in sys.stdlib_module_names or root in OPTIONAL or root == "multiprocessing_pdb"
            assert known, f"{path} imports {name}"


def test_it_installs_without_moeverify(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "source")  # setuptools writes beside its sources
    options = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target"]
    built = subprocess.run(
        [sys.executable, "-m", "pip", *options, tmp_path / "site", tmp_path / "source"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert built.returncode == 0, built.stderr
    installed = {p.name for p in (tmp_path / "site").iterdir() if p.suffix != ".dist-info"}
    assert installed == {"multiprocessing_pdb"}
    blocked = "import sys; sys.modules.update(dict.fromkeys(['moeverify', 'torch', 'typer', 'rich']))\n"
    code = blocked + (
        "import multiprocessing_pdb.rank.stop, multiprocessing_pdb.console.command_line as c\n"
        "print(c.__file__); sys.exit(c.main(['-c', 'jobs']))"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": path, "MPDB_DIR": str(tmp_path / "run"), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    where, answer = done.stdout.splitlines()
    assert Path(where).is_relative_to(tmp_path)
    assert answer == "no rank is stopped"
