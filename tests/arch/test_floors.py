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
    "moeverify/case/__init__.py": "",
    "moeverify/case/schema.py": "from moeverify.errors import E\n",
    "moeverify/compare/__init__.py": "",
    "moeverify/results/run.py": "import json\n",
    "moeverify/axes/__init__.py": "",
    "moeverify/axes/mesh.py": "from moeverify.case.schema import E\n",
    "moeverify/golden/__init__.py": "",
    "moeverify/golden/store.py": "import torch\nfrom moeverify.axes import mesh\n",
    "moeverify/controller/__init__.py": "",
    "moeverify/results/__init__.py": "",
    "moeverify/controller/run.py": "def f():\n    import moeverify.golden.store\n",
    "moeverify/controller/machine.py": "import os\nHOME = os.environ['HOME']\n",
    "moeverify/cli/__init__.py": "from moeverify.controller.run import f\n",
    "multiprocessing_pdb/__init__.py": "print('prompt')\n",
}

BROKEN = {
    "upwards": (
        "floors",
        "moeverify/axes/mesh.py",
        "from moeverify.golden.store import x\n",
        "moeverify/axes/mesh.py:1: `axes` (floor 2) imports `moeverify.golden.store` (floor 3)",
    ),
    "sideways": (
        "floors",
        "moeverify/compare/judge.py",
        "import moeverify.golden.store\n",
        "moeverify/compare/judge.py:1: `compare` (floor 3) imports `moeverify.golden.store` (floor 3)",
    ),
    "lazily": (
        "floors",
        "moeverify/case/schema.py",
        "def f():\n    try:\n        from moeverify.axes import mesh\n    finally:\n        pass\n",
        "moeverify/case/schema.py:3: `case` (floor 1) imports `moeverify.axes.mesh` (floor 2)",
    ),
    "for types": (
        "floors",
        "moeverify/errors.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from moeverify.case.schema import E\n",
        "moeverify/errors.py:3: `errors` (floor -1) imports `moeverify.case.schema` (floor 1)",
    ),
    "relatively": (
        "floors",
        "moeverify/axes/__init__.py",
        "from ..controller import run\n",
        "moeverify/axes/__init__.py:1: `axes` (floor 2) imports `moeverify.controller.run` (floor 8)",
    ),
    "by a text": (
        "floors",
        "moeverify/golden/store.py",
        "import importlib\nimportlib.import_module('moeverify.controller.run')\n",
        "moeverify/golden/store.py:2: `golden` (floor 3) imports `moeverify.controller.run` (floor 8)",
    ),
    "the package itself": (
        "floors",
        "moeverify/controller/machine.py",
        "import moeverify\n",
        "moeverify/controller/machine.py:1: `controller` (floor 8) imports `moeverify` (floor 9)",
    ),
    "the debugger": (
        "floors",
        "multiprocessing_pdb/__init__.py",
        "from moeverify.errors import E\n",
        "multiprocessing_pdb/__init__.py:1: `multiprocessing_pdb` (floor -1) imports `moeverify.errors` (floor -1)",
    ),
    "a package without a floor": (
        "floors",
        "moeverify/cellar/wine.py",
        "",
        "moeverify/cellar/wine.py:1: the floor of `cellar` is not in FLOORS",
    ),
    "a module that is gone": (
        "floors",
        "moeverify/controller/run.py",
        "from moeverify.golden.gone import x\n",
        "moeverify/controller/run.py:1: `moeverify.golden.gone` does not exist",
    ),
    "a circle in a package": (
        "circles",
        "moeverify/controller/machine.py",
        "def g():\n    from moeverify.controller import other\n",
        "circle moeverify.controller.machine -> moeverify.controller.other -> moeverify.controller.machine",
    ),
    "torch directly": (
        "torch",
        "moeverify/results/run.py",
        "import torch.nn\n",
        "moeverify/results/run.py:1: reaches torch by moeverify.results.run -> torch.nn",
    ),
    "torch later": (
        "torch",
        "moeverify/case/schema.py",
        "def f():\n    from torch import nn\n",
        "moeverify/case/schema.py:2: imports torch",
    ),
    "torch behind others": (
        "torch",
        "moeverify/controller/run.py",
        "from moeverify.controller.machine import x\nfrom moeverify.golden import store\n",
        "moeverify/cli/__init__.py:1: reaches torch by moeverify.cli -> moeverify.controller.run -> "
        "moeverify.golden.store -> torch",
    ),
    "torch in a parent": (
        "torch",
        "moeverify/axes/__init__.py",
        "import torch\n",
        "moeverify/axes/mesh.py:1: reaches torch by moeverify.axes.mesh -> moeverify.axes -> torch",
    ),
    "print": (
        "print",
        "moeverify/controller/run.py",
        "def f():\n    print(1)\n",
        "moeverify/controller/run.py:2: print",
    ),
    "environment": (
        "environment",
        "moeverify/golden/store.py",
        "import os\nx = os.environ.get('A')\n",
        "moeverify/golden/store.py:2: reads the environment",
    ),
    "getenv": (
        "environment",
        "moeverify/controller/run.py",
        "from os import getenv\n",
        "moeverify/controller/run.py:1: reads the environment",
    ),
    "a name": (
        "names",
        "moeverify/case/utils.py",
        "",
        "moeverify/case/utils.py:1: `utils` says nothing",
    ),
    "a package's name": ("names", "moeverify/common/words.py", "", "moeverify/common/words.py:1: `common`"),
    "a long file": (
        "sizes",
        "moeverify/case/schema.py",
        "x = 1\n" * 501,
        "moeverify/case/schema.py:1: 501 lines, at most 500",
    ),
    "a long function": (
        "sizes",
        "moeverify/case/schema.py",
        "class C:\n    def f(self):\n" + "        x = 1\n" * 59,
        "moeverify/case/schema.py:2: `f` has 60 lines, at most 59",
    ),
    "an umlaut": (
        "characters",
        "moeverify/case/schema.py",
        "x = 1\ny = '\u00fc'\n",
        "moeverify/case/schema.py:2: not ASCII",
    ),
    "an avoided word": (
        "prose",
        "moeverify/case/schema.py",
        'def f() -> None:\n    """Return what the caller is told."""\n',
        "moeverify/case/schema.py:2: `what`",
    ),
    "a long sentence": (
        "prose",
        "moeverify/case/schema.py",
        f'"""{"word " * 43}."""\n',
        "moeverify/case/schema.py:1: a sentence of 44 words, at most 42",
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
        "moeverify/controller/other.py": "from moeverify.controller.machine import HOME\n",
        "moeverify/axes/split.py": "",
    }
    found = list(RULES[rule](build(tmp_path, {**SOUND, **more, path: text})))
    assert any(message in line for line in found), found


def test_long_files_raise_the_median(tmp_path: Path) -> None:
    files = {f"moeverify/case/a{number}.py": "x = 1\n" * 151 for number in range(len(SOUND) + 1)}
    found = list(RULES["sizes"](build(tmp_path, {**SOUND, **files})))
    assert found == ["median of the files: 151 lines, at most 150"]


def test_the_controller_does_not_import_torch() -> None:
    code = (
        "import sys; import moeverify.cli, moeverify.controller.run, moeverify.controller.golden, "
        "moeverify.controller.mesh, moeverify.pytest_plugin.item, moeverify.report.text\n"
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
