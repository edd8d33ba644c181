"""The code follows the architecture rules, and each rule catches a violation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from house import RULES, House

ROOT = Path(__file__).parents[2]

SOUND = {
    "moeverify/__init__.py": "",
    "moeverify/errors.py": "class E(Exception): ...\n",
    "moeverify/cases/__init__.py": "",
    "moeverify/cases/schema.py": "from moeverify.errors import E\n",
    "moeverify/verification/compare/__init__.py": "",
    "moeverify/results/run.py": "import json\n",
    "moeverify/cases/axes/__init__.py": "",
    "moeverify/cases/axes/mesh.py": "from moeverify.cases.schema import E\n",
    "moeverify/verification/golden/__init__.py": "",
    "moeverify/verification/golden/store.py": "import torch\nfrom moeverify.cases.axes import mesh\n",
    "moeverify/verification/controller/__init__.py": "",
    "moeverify/results/__init__.py": "",
    "moeverify/verification/controller/run.py": "def f():\n    import moeverify.verification.golden.store\n",
    "moeverify/verification/controller/machine.py": "import os\nHOME = os.environ['HOME']\n",
    "moeverify/cli/__init__.py": "from moeverify.verification.controller.run import f\n",
    "multiprocessing_pdb/__init__.py": "print('prompt')\n",
}

BROKEN = {
    "upwards": (
        "floors",
        "moeverify/cases/axes/mesh.py",
        "from moeverify.verification.golden.store import x\n",
        "moeverify/cases/axes/mesh.py:1: `cases.axes` (floor 2) "
        "imports `moeverify.verification.golden.store` (floor 3)",
    ),
    "sideways": (
        "floors",
        "moeverify/verification/compare/judge.py",
        "import moeverify.verification.golden.store\n",
        "moeverify/verification/compare/judge.py:1: `verification.compare` (floor 3) "
        "imports `moeverify.verification.golden.store` (floor 3)",
    ),
    "lazily": (
        "floors",
        "moeverify/cases/schema.py",
        "def f():\n    try:\n        from moeverify.cases.axes import mesh\n    finally:\n        pass\n",
        "moeverify/cases/schema.py:3: `cases` (floor 0) imports `moeverify.cases.axes.mesh` (floor 2)",
    ),
    "for types": (
        "floors",
        "moeverify/errors.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from moeverify.cases.schema import E\n",
        "moeverify/errors.py:3: `errors` (floor -3) imports `moeverify.cases.schema` (floor 0)",
    ),
    "relatively": (
        "floors",
        "moeverify/cases/axes/__init__.py",
        "from ...verification.controller import run\n",
        "moeverify/cases/axes/__init__.py:1: `cases.axes` (floor 2) "
        "imports `moeverify.verification.controller.run` (floor 8)",
    ),
    "by a text": (
        "floors",
        "moeverify/verification/golden/store.py",
        "import importlib\nimportlib.import_module('moeverify.verification.controller.run')\n",
        "moeverify/verification/golden/store.py:2: `verification.golden` (floor 3) "
        "imports `moeverify.verification.controller.run` (floor 8)",
    ),
    "the package itself": (
        "floors",
        "moeverify/verification/controller/machine.py",
        "import moeverify\n",
        "moeverify/verification/controller/machine.py:1: `verification.controller` (floor 8) "
        "imports `moeverify` (floor 9)",
    ),
    "the debugger": (
        "floors",
        "multiprocessing_pdb/__init__.py",
        "from moeverify.errors import E\n",
        "multiprocessing_pdb/__init__.py:1: `multiprocessing_pdb` (floor -4) "
        "imports `moeverify.errors` (floor -3)",
    ),
    "a package without a floor": (
        "floors",
        "moeverify/cellar/wine.py",
        "",
        "moeverify/cellar/wine.py:1: the floor of `cellar` is not in FLOORS",
    ),
    "a module that is gone": (
        "floors",
        "moeverify/verification/controller/run.py",
        "from moeverify.verification.golden.gone import x\n",
        "moeverify/verification/controller/run.py:1: `moeverify.verification.golden.gone` does not exist",
    ),
    "a circle in a package": (
        "circles",
        "moeverify/verification/controller/machine.py",
        "def g():\n    from moeverify.verification.controller import other\n",
        "circle moeverify.verification.controller.machine -> "
        "moeverify.verification.controller.other -> moeverify.verification.controller.machine",
    ),
    "torch directly": (
        "torch",
        "moeverify/results/run.py",
        "import torch.nn\n",
        "moeverify/results/run.py:1: reaches torch by moeverify.results.run -> torch.nn",
    ),
    "torch later": (
        "torch",
        "moeverify/cases/schema.py",
        "def f():\n    from torch import nn\n",
        "moeverify/cases/schema.py:2: imports torch",
    ),
    "torch behind others": (
        "torch",
        "moeverify/verification/controller/run.py",
        "from moeverify.verification.controller.machine import x\nfrom moeverify.verification.golden import store\n",
        "moeverify/cli/__init__.py:1: reaches torch by moeverify.cli -> moeverify.verification.controller.run -> "
        "moeverify.verification.golden.store -> torch",
    ),
    "torch in a parent": (
        "torch",
        "moeverify/cases/axes/__init__.py",
        "import torch\n",
        "moeverify/cases/axes/mesh.py:1: reaches torch by moeverify.cases.axes.mesh -> moeverify.cases.axes -> torch",
    ),
    "print": (
        "print",
        "moeverify/verification/controller/run.py",
        "def f():\n    print(1)\n",
        "moeverify/verification/controller/run.py:2: print",
    ),
    "environment": (
        "environment",
        "moeverify/verification/golden/store.py",
        "import os\nx = os.environ.get('A')\n",
        "moeverify/verification/golden/store.py:2: reads the environment",
    ),
    "getenv": (
        "environment",
        "moeverify/verification/controller/run.py",
        "from os import getenv\n",
        "moeverify/verification/controller/run.py:1: reads the environment",
    ),
    "a reader": (
        "readers",
        "moeverify/verification/golden/store.py",
        "import json\ndef f(path):\n    return json.loads(path.read_text())\n",
        "moeverify/verification/golden/store.py:3: reads a file past `input_file` and `json_file`",
    ),
    "a name": (
        "names",
        "moeverify/cases/utils.py",
        "",
        "moeverify/cases/utils.py:1: `utils` says nothing",
    ),
    "a package's name": ("names", "moeverify/common/words.py", "", "moeverify/common/words.py:1: `common`"),
    "a class of another module": (
        "names",
        "moeverify/results/run.py",
        "class E: ...\n",
        "moeverify/results/run.py:1: moeverify/errors.py has a class `E` too",
    ),
    "a long file": (
        "sizes",
        "moeverify/cases/schema.py",
        "x = 1\n" * 501,
        "moeverify/cases/schema.py:1: 501 lines, at most 500",
    ),
    "a long function": (
        "sizes",
        "moeverify/cases/schema.py",
        "class C:\n    def f(self):\n" + "        x = 1\n" * 59,
        "moeverify/cases/schema.py:2: `f` has 60 lines, at most 59",
    ),
    "an umlaut": (
        "characters",
        "moeverify/cases/schema.py",
        "x = 1\ny = '\u00fc'\n",
        "moeverify/cases/schema.py:2: not ASCII",
    ),
    "an avoided word": (
        "prose",
        "moeverify/cases/schema.py",
        'def f() -> None:\n    """Return what the caller is told."""\n',
        "moeverify/cases/schema.py:2: `what`",
    ),
    "an avoided word in a comment": (
        "prose",
        "moeverify/cases/schema.py",
        "x = 1  # stands for one\n",
        "moeverify/cases/schema.py:1: x = 1  # stands for one",
    ),
    "a long sentence": (
        "prose",
        "moeverify/cases/schema.py",
        f'"""{"word " * 43}."""\n',
        "moeverify/cases/schema.py:1: a sentence of 44 words, at most 42",
    ),
    "an umlaut in a template": (
        "characters",
        "moeverify/report/templates/page.html",
        "<p>\u00fc</p>\n",
        "moeverify/report/templates/page.html:1: not ASCII",
    ),
}


def build(root: Path, files: dict[str, str]) -> House:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return House.read(root)


@pytest.fixture(scope="module")
def house() -> House:
    return House.read(ROOT)


@pytest.mark.parametrize("rule", RULES)
def test_the_code_keeps_the_rule(rule: str, house: House) -> None:
    assert len(house.sources) > 100
    assert "\n".join(RULES[rule](house)) == ""


@pytest.mark.parametrize("rule", RULES)
def test_a_sound_tree_breaks_no_rule(rule: str, tmp_path: Path) -> None:
    assert list(RULES[rule](build(tmp_path, SOUND))) == []


@pytest.mark.parametrize("title", BROKEN)
def test_a_rule_catches_what_breaks_it(title: str, tmp_path: Path) -> None:
    rule, path, text, message = BROKEN[title]
    more = {
        "moeverify/verification/controller/other.py": "from moeverify.verification.controller.machine import HOME\n",
        "moeverify/cases/axes/split.py": "",
    }
    found = list(RULES[rule](build(tmp_path, {**SOUND, **more, path: text})))
    assert any(message in line for line in found), found


def test_long_files_raise_the_median(tmp_path: Path) -> None:
    files = {f"moeverify/cases/a{number}.py": "x = 1\n" * 151 for number in range(len(SOUND) + 1)}
    found = list(RULES["sizes"](build(tmp_path, {**SOUND, **files})))
    assert found == ["median of the files: 151 lines, at most 150"]


def test_the_controller_does_not_import_torch() -> None:
    code = (
        "import sys; import moeverify.cli, moeverify.pytest_plugin.item, moeverify.report.text\n"
        "from moeverify.verification.controller import golden, mesh, run\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


def test_the_pytest_plugin_costs_other_sessions_nothing() -> None:
    code = (
        "import sys; import moeverify.pytest_plugin\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'ruamel.yaml', 'rich', 'typer'} & set(sys.modules)\n"
        "ours = {name for name in sys.modules if name.startswith('moeverify')}\n"
        "ours -= {'moeverify', 'moeverify.pytest_plugin', 'moeverify.pytest_plugin.recognition'}\n"
        "sys.exit(' '.join(sorted(heavy | ours)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_comparison_of_scripts_imports_no_parallelism_and_no_hypotheses() -> None:
    code = (
        "import sys; import moeverify.scripts.compare.compare\n"
        "heavy = {'torch.distributed.pipelining', 'moeverify.train.program', 'moeverify.scripts.compare.explain'}\n"
        "sys.exit(' '.join(sorted(heavy & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
