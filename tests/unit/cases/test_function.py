"""A function that exists is never reported as missing."""

import importlib.util
import sys

import pytest

from moeverify.cases.function import examine_function

SOURCE = """
from os.path import join as joined
import json
if True:
    def inside(): pass
made = lambda: None
class Thing: pass
async def later(): pass
first, second = made, made
"""


@pytest.mark.parametrize(
    "name",
    ["joined", "json", "inside", "made", "Thing", "later", "second", "Thing.small", "missing", "local"],
)
def test_names_at_the_top_of_a_module(tmp_path, name):
    (tmp_path / "own_functions.py").write_text(SOURCE + "def outer():\n    def local(): pass\n")
    problem = examine_function(f"own_functions:{name}", [str(tmp_path)], "--fault")
    assert (problem is None) == (name not in ("missing", "local"))


@pytest.mark.parametrize("line", ["from os.path import *", "def __getattr__(name): return print"])
def test_a_module_that_makes_names_when_it_runs_is_believed(tmp_path, line):
    (tmp_path / "makes_names.py").write_text(line + "\n")
    assert examine_function("makes_names:anything", [str(tmp_path)], "--fault") is None


@pytest.mark.parametrize(
    "source",
    [
        b"x = " + b"-" * 200_000 + b"1\n",
        b"x = a" + b".b" * 100_000,
        b"x = 1\0\n",
        b"\xff\xfe",
        b"# coding: none\n",
    ],
)
def test_what_no_parser_reads_is_a_problem_of_that_file(tmp_path, source):
    (tmp_path / "unreadable.py").write_bytes(source)
    problem = examine_function("unreadable:f", [str(tmp_path)], "--fault")
    assert problem is not None
    assert "unreadable.py" in problem.message


def test_packages_are_walked_without_an_import(tmp_path):
    package = tmp_path / "deep" / "er"
    package.mkdir(parents=True)
    (tmp_path / "deep" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "own.py").write_text("def f(): pass\n")
    assert examine_function("deep.er.own:f", [str(tmp_path)], "--fault") is None
    problem = examine_function("deep.other.own:f", [str(tmp_path)], "--fault")
    assert problem is not None
    assert "`deep.other`" in problem.message


def test_what_is_not_written_in_python_is_believed():
    assert examine_function("math:sqrt", [], "--fault") is None
    assert examine_function("sys:exit", [], "--fault") is None
    assert (
        examine_function("moeverify.faults.catalogue.expert_gradients:a01_ddp_expert_scale", [], "--fault")
        is None
    )


def test_a_package_that_only_a_finder_of_its_own_knows_is_found(tmp_path, monkeypatch):
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "made.py").write_text("def make(): pass\n")
    (tmp_path / "installed" / "__init__.py").write_text("")

    class Finder:
        @staticmethod
        def find_spec(name, path, target=None):
            origin = tmp_path / "installed" / "__init__.py"
            if name == "edited_package":
                return importlib.util.spec_from_file_location(
                    name, origin, submodule_search_locations=[str(origin.parent)]
                )
            return None

    assert examine_function("edited_package.made:make", [], "--fault") is not None
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert examine_function("edited_package.made:make", [], "--fault") is None
    assert examine_function("edited_package.absent:make", [], "--fault") is not None
