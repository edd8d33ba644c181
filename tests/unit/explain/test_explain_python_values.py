"""Values of Python names: recording, comparison with one device, and the definitions that they single out."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from moeverify.explain.definitions import Definitions
from moeverify.explain.evidence import DefiningLine
from moeverify.explain.lines import Lines
from moeverify.explain.program import SETUP, Program, Site
from moeverify.explain.python_values import Difference, PythonValues, encode
from moeverify.explain.syntax import asks_layout

SOURCE = """
def depth_of(name, layers):
    return layers - int(name[-1])

def list_groups(names, quirk):
    groups = []
    for name in names:
        depth = depth_of(name, 3)
        if quirk == "reversed":
            depth = 3 - depth
        decays = name != "embed0" and quirk != "all"
        groups.append((name, 0.5**depth, 0.1 if decays else 0.0))
    return groups

class Pair:
    def __init__(self, name):
        self.first = self.second = name

    def swap(self):
        self.first = self.second + ""
        self.second = self.first + ""
        return take(self.first)

def take(name):
    return name

class Optimizer:
    def __init__(self, names, quirk, ranks):
        self.ranks = ranks
        self.groups = list_groups(names, quirk)

    def step(self):
        total = 0.0
        for name, rate, decay in self.groups:
            total += scale(rate, decay, self.ranks)
        return total

def scale(rate, decay, ranks):
    return rate * decay / ranks

def average(rows, count):
    some = count + 0
    part = rows[:some]
    length = len(part)
    weight = 1 / length
    return weight * 3
"""


@pytest.fixture
def module(tmp_path: Path) -> ModuleType:
    path = tmp_path / "optimizer.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("optimizer", path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def record(run: Callable[[], object]) -> Program:
    program = Program()
    with Lines(program).following():
        run()
    return program


def train(module: ModuleType, quirk: str, ranks: int) -> Program:
    return record(lambda: module.Optimizer(["embed0", "block1"], quirk, ranks).step())


def find(module: ModuleType, expression: str, one: Program, program: Program) -> list[tuple[str, Any]]:
    """Return the source of each line that defines what an expression takes, with its difference."""
    path = str(module.__file__)
    node = next(
        each
        for each in ast.walk(ast.parse(SOURCE))
        if isinstance(each, ast.expr) and ast.get_source_segment(SOURCE, each) == expression
    )
    span = (node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0)
    executed = {path: {line for _, line in program.lines[SETUP]}}
    values = PythonValues(one.names, [program.names], one.lines[SETUP])
    definitions = Definitions([path], lambda file, line: False, executed, values)
    found = definitions.find([Site(path, node.lineno, "", 0, span)])
    return [(SOURCE.splitlines()[site.line - 1].strip(), difference) for site, difference in found.items()]


def test_assigned_values_parameters_and_results_are_recorded(module: ModuleType) -> None:
    names = train(module, "", 1).names[SETUP]
    found = {(line, name): values for (_, line, name), values in names.items()}
    assert found[8, "depth"] == [3, 2]
    assert found[2, "name"] == ["embed0", "block1"]
    assert found[3, "return"] == [3, 2]
    assert found[29, "self.ranks"] == [1]
    assert found[34, "decay"][:2] == [0.0, 0.1]


@pytest.mark.parametrize(
    ("quirk", "first"),
    [
        ("reversed", ("depth = 3 - depth", Difference("0", None))),
        ("all", ('decays = name != "embed0" and quirk != "all"', Difference("False", "True"))),
    ],
    ids=["a line of ranks alone", "another value of equal ones"],
)
def test_the_line_that_makes_a_value_wrong_comes_first(
    module: ModuleType, quirk: str, first: tuple[str, Difference]
) -> None:
    one, ranks = train(module, "", 1), train(module, quirk, 2)
    assert find(module, "scale(rate, decay, self.ranks)", one, ranks)[0] == first


def test_lines_that_define_equal_values_are_left_out(module: ModuleType) -> None:
    one, ranks = train(module, "", 1), train(module, "reversed", 1)
    lines = [line for line, _ in find(module, "scale(rate, decay, self.ranks)", one, ranks)]
    assert not any(line.startswith("decays") for line in lines)


def test_values_that_define_each_other_are_followed_once(module: ModuleType) -> None:
    one, ranks = record(module.Pair("weight").swap), record(module.Pair("module.weight").swap)
    found = find(module, "take(self.first)", one, ranks)
    assert [line for line, _ in found].count('self.first = self.second + ""') == 1
    assert ('self.second = self.first + ""', Difference("'module.weight'", "'weight'")) in found


def test_a_size_of_the_run_is_no_evidence(module: ModuleType) -> None:
    one, ranks = train(module, "", 1), train(module, "", 2)
    found, same = (find(module, "rate * decay / ranks", each, ranks) for each in (one, ranks))
    assert [line for line, _ in found] == [line for line, _ in same]


def test_the_size_of_a_part_is_asked_for_where_it_becomes_a_number(module: ModuleType) -> None:
    rows = list(range(16))
    one, ranks = (record(lambda count=count: module.average(rows, count)) for count in (16, 8))
    assert find(module, "weight * 3", one, ranks) == [
        ("weight = 1 / length", Difference("0.125", "0.0625")),
        ("length = len(part)", Difference("8", "16", True)),
    ]


@pytest.mark.parametrize(
    ("mine", "theirs", "difference"),
    [
        ([1, 2], [1, 2], None),
        ([2], [1, 2], None),  # a loop over a part of the layers
        ([1, 3], [1, 2], Difference("3", "2", True)),
        ([3], [1, 2], Difference("3", "1", True)),
        ([("a", [1, 2])], [("a", [1, 4])], Difference("2", "4", True)),
        ([[torch.ones(1)] * 2], [[torch.ones(1)] * 3], Difference("", "")),
        ([torch.ones(1)], [None], None),
        ([0.1 + 0.2], [0.3], None),
        ([torch.float32], [torch.float64], Difference("torch.float32", "torch.float64")),
        ([torch.device("cuda:1")], [torch.device("cuda:0")], None),
        (["a" * 300], ["b" * 300], Difference("", "")),
    ],
    ids=[
        "equal",
        "some",
        "other",
        "none of them",
        "member",
        "length",
        "objects",
        "rounding",
        "dtype",
        "device",
        "text",
    ],
)
def test_values_differ_where_they_do_not_occur_on_one_device(
    mine: list[object], theirs: list[object], difference: Difference | None
) -> None:
    name = ("a.py", 3, "x")
    values = PythonValues({0: {name: list(map(encode, theirs))}}, [{0: {name: list(map(encode, mine))}}])
    assert values.compare(name, ()) == difference


def test_a_line_counts_as_new_only_in_a_function_that_one_device_runs() -> None:
    name = ("a.py", 3, "x")
    values = PythonValues({0: {}}, [{0: {name: [1]}}], [("a.py", 2)])
    assert values.compare(name, range(1, 5)) == Difference("1", None)
    assert values.compare(name, range(3, 5)) is None


def test_a_property_is_not_called_to_look_up_a_value(tmp_path: Path) -> None:
    calls: list[str] = []

    class Counter:
        @property
        def count(self) -> int:
            calls.append("count")
            return 1

        @count.setter
        def count(self, value: int) -> None:
            pass

    path = tmp_path / "count.py"
    path.write_text("def run(counter):\n    counter.count = 3\n    return 0\n")
    space: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), space)
    program = record(lambda: space["run"](Counter()))
    assert not calls
    assert (str(path), 3, "return") in program.names[SETUP]


def test_no_code_of_the_program_runs_to_look_up_or_keep_a_value(tmp_path: Path) -> None:
    """As in the `ConfigWrapper` of pydantic, whose `__getattr__` reads an attribute that `__init__` sets."""
    calls: list[str] = []

    class Config(dict[str, int]):
        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            return self.values[name]

        def __getattribute__(self, name: str) -> Any:
            calls.append(name)
            return super().__getattribute__(name)

        def __len__(self) -> int:
            calls.append("len")
            raise RuntimeError("not ready")

    path = tmp_path / "config.py"
    path.write_text("def run(config):\n    config.effective['a'] = config.size = 3\n    return config\n")
    space: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), space)
    config = Config(width=4)
    config.__dict__["effective"] = {}
    calls.clear()
    program = record(lambda: space["run"](config))
    assert calls == ["effective"]  # the program's own access
    assert program.names[SETUP][str(path), 2, "config.size"] == [3]
    assert program.names[SETUP][str(path), 3, "return"] == [(1, ((2, ("width", 4)),))]


def test_a_name_of_modules_alone_is_one_of_objects() -> None:
    made = {"module": torch.nn.Identity(), "tensor": torch.ones(2), "number": 2}
    names = {("a.py", line, name): [encode(value)] for line, (name, value) in enumerate(made.items())}
    values = PythonValues({}, [{0: names}])
    assert [
        name for _, _, name in names if values.is_object(next(each for each in names if each[2] == name))
    ] == ["module"]
    assert not values.is_object(("a.py", 9, "other"))


def test_names_with_process_groups_and_meshes_are_told_from_other_objects() -> None:
    mesh = encode(object.__new__(DeviceMesh))
    names = {
        ("a.py", 1, "return"): [None, mesh],
        ("a.py", 2, "mesh"): [mesh],
        ("a.py", 3, "it"): [encode(object())],
    }
    values = PythonValues({}, [{0: names}])
    assert set(values.list_groups()) == {("a.py", 1, "return"), ("a.py", 2, "mesh")}
    assert [values.is_object(("a.py", line, name)) for line, name in ((2, "mesh"), (3, "it"))] == [True, True]


@pytest.mark.parametrize(
    ("made", "is_number"), [([2, 0.5], True), (["x"], False), ([2, None], False), ([], False)]
)
def test_a_name_with_numbers_alone_is_a_number(made: list[Any], *, is_number: bool) -> None:
    name = ("a.py", 1, "x")
    assert PythonValues({}, [{0: {name: made}}]).is_number(name) is is_number


@pytest.mark.parametrize(("value", "is_made"), [("count * mesh.size()", False), ("count * 2", True)])
def test_a_size_of_a_mesh_differs_in_a_right_layout_too(value: str, *, is_made: bool) -> None:
    node = ast.parse(value, mode="eval").body
    line = DefiningLine(
        Site("a.py", 1, "f"),
        Difference("2", "1", is_integer=True),
        asks_layout=asks_layout(node),
        has_known=True,
    )
    assert line.is_made is is_made


def test_a_name_that_passes_on_an_integer_makes_none() -> None:
    site, difference = Site("a.py", 1, "f"), Difference("2", "1", is_integer=True)
    assert not DefiningLine(site, difference, passes=True, has_known=True).is_made
    assert DefiningLine(site, Difference("0.5", "0.1"), passes=True, has_known=True).is_made
