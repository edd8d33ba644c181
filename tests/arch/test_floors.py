"""The code keeps the rules of the house, and every rule is seen to catch what breaks it."""

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
    "moeverify/compare/result.py": "import json\n",
    "moeverify/layout/__init__.py": "",
    "moeverify/layout/mesh.py": "from moeverify.case.schema import E\n",
    "moeverify/golden/__init__.py": "",
    "moeverify/golden/store.py": "import torch\nfrom moeverify.layout import mesh\n",
    "moeverify/suite/__init__.py": "",
    "moeverify/suite/run.py": "def f():\n    import moeverify.golden.store\n",
    "moeverify/suite/machine.py": "import os\nHOME = os.environ['HOME']\n",
    "moeverify/cli/__init__.py": "from moeverify.suite.run import f\n",
    "multiprocessing_pdb/__init__.py": "print('prompt')\n",
}

BROKEN = {
    "upwards": (
        "floors",
        "moeverify/layout/mesh.py",
        "from moeverify.golden.store import x\n",
        "moeverify/layout/mesh.py:1: `layout` (floor 1) imports `moeverify.golden.store` (floor 2)",
    ),
    "sideways": (
        "floors",
        "moeverify/compare/judge.py",
        "import moeverify.golden.store\n",
        "moeverify/compare/judge.py:1: `compare` (floor 2) imports `moeverify.golden.store` (floor 2)",
    ),
    "lazily": (
        "floors",
        "moeverify/case/schema.py",
        "def f():\n    try:\n        from moeverify.layout import mesh\n    finally:\n        pass\n",
        "moeverify/case/schema.py:3: `case` (floor 0) imports `moeverify.layout.mesh` (floor 1)",
    ),
    "for types": (
        "floors",
        "moeverify/errors.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from moeverify.case.schema import E\n",
        "moeverify/errors.py:3: `errors` (floor -1) imports `moeverify.case.schema` (floor 0)",
    ),
    "relatively": (
        "floors",
        "moeverify/layout/__init__.py",
        "from ..suite import run\n",
        "moeverify/layout/__init__.py:1: `layout` (floor 1) imports `moeverify.suite.run` (floor 6)",
    ),
    "by a text": (
        "floors",
        "moeverify/golden/store.py",
        "import importlib\nimportlib.import_module('moeverify.suite.run')\n",
        "moeverify/golden/store.py:2: `golden` (floor 2) imports `moeverify.suite.run` (floor 6)",
    ),
    "the package itself": (
        "floors",
        "moeverify/suite/machine.py",
        "import moeverify\n",
        "moeverify/suite/machine.py:1: `suite` (floor 6) imports `moeverify` (floor 7)",
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
        "moeverify/suite/run.py",
        "from moeverify.golden.gone import x\n",
        "moeverify/suite/run.py:1: `moeverify.golden.gone` does not exist",
    ),
    "a circle in a package": (
        "circles",
        "moeverify/suite/machine.py",
        "def g():\n    from moeverify.suite import other\n",
        "circle moeverify.suite.machine -> moeverify.suite.other -> moeverify.suite.machine",
    ),
    "torch directly": (
        "torch",
        "moeverify/compare/result.py",
        "import torch.nn\n",
        "moeverify/compare/result.py:1: reaches torch by moeverify.compare.result -> torch.nn",
    ),
    "torch later": (
        "torch",
        "moeverify/case/schema.py",
        "def f():\n    from torch import nn\n",
        "moeverify/case/schema.py:2: imports torch",
    ),
    "torch behind others": (
        "torch",
        "moeverify/suite/run.py",
        "from moeverify.suite.machine import x\nfrom moeverify.golden import store\n",
        "moeverify/cli/__init__.py:1: reaches torch by moeverify.cli -> moeverify.suite.run -> "
        "moeverify.golden.store -> torch",
    ),
    "torch in a parent": (
        "torch",
        "moeverify/layout/__init__.py",
        "import torch\n",
        "moeverify/layout/mesh.py:1: reaches torch by moeverify.layout.mesh -> moeverify.layout -> torch",
    ),
    "print": (
        "print",
        "moeverify/suite/run.py",
        "def f():\n    print(1)\n",
        "moeverify/suite/run.py:2: print",
    ),
    "environment": (
        "environment",
        "moeverify/golden/store.py",
        "import os\nx = os.environ.get('A')\n",
        "moeverify/golden/store.py:2: reads the environment",
    ),
    "getenv": (
        "environment",
        "moeverify/suite/run.py",
        "from os import getenv\n",
        "moeverify/suite/run.py:1: reads the environment",
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
        "moeverify/suite/other.py": "from moeverify.suite.machine import HOME\n",
        "moeverify/layout/split.py": "",
    }
    found = list(RULES[rule](build(tmp_path, {**SOUND, **more, path: text})))
    assert any(message in line for line in found), found


def test_long_files_raise_the_median(tmp_path: Path) -> None:
    files = {f"moeverify/case/a{number}.py": "x = 1\n" * 151 for number in range(len(SOUND) + 1)}
    found = list(RULES["sizes"](build(tmp_path, {**SOUND, **files})))
    assert found == ["median of the files: 151 lines, at most 150"]


def test_the_controller_does_not_import_torch() -> None:
    code = (
        "import sys; import moeverify.cli, moeverify.suite.run, moeverify.suite.record, moeverify.suite.mesh, "
        "moeverify.pytest_plugin.item, moeverify.report.text\n"
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
