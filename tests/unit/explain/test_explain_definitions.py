"""Definitions of the numbers, groups and flags that a call takes, found in source code."""

from __future__ import annotations

import ast
from collections.abc import Collection
from pathlib import Path

import pytest

from moeverify.explain.definitions import Definitions
from moeverify.explain.describe import read_expression
from moeverify.explain.program import Site

SOURCE = """
class Bucket:
    def __init__(self, group, size):
        self.group = group
        self.size = size
        self.armed = False

    def begin(self, last):
        self.armed = last

    def reduce(self, flat):
        if self.armed:
            collect(flat, self.group)
            flat.clone()

def add(items, group, size):
    return Bucket(group, size)

def rank_of(group):
    return group.rank() + 1

def step(plan, flats, count):
    scale = plan.ranks / count
    for i, flat in enumerate(flats):
        plan.bucket.begin(i == 0)
        use(flat * scale)
    keep = flat.chunk(4)[rank_of(plan.group)]

def setup(mesh):
    return Plan(ranks=mesh.size("dp"), bucket=add([], mesh.group("dp"), 1 + 1))

class Plan:
    ranks: int
    bucket: Bucket
"""


def find(
    path: Path, source: str, expression: str, right: Collection[int] = (), *, keyword: str = ""
) -> list[str]:
    """Return the code of the lines that define what an expression takes."""
    path.write_text(source)
    node = next(
        each
        for each in ast.walk(ast.parse(source))
        if isinstance(each, ast.expr) and ast.get_source_segment(source, each) == expression
    )
    span = (node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0)
    definitions = Definitions([str(path)], lambda file, line: line in right)
    lines = source.splitlines()
    return [
        lines[site.line - 1].strip()
        for site in definitions.find([Site(str(path), node.lineno, "", 0, span)], keyword=keyword)
    ]


@pytest.mark.parametrize(
    ("expression", "line"),
    [
        (
            "collect(flat, self.group)",
            'return Plan(ranks=mesh.size("dp"), bucket=add([], mesh.group("dp"), 1 + 1))',
        ),
        ("flat * scale", "scale = plan.ranks / count"),
        ("flat * scale", 'return Plan(ranks=mesh.size("dp"), bucket=add([], mesh.group("dp"), 1 + 1))'),
        ("flat.clone()", "plan.bucket.begin(i == 0)"),
        ("flat.chunk(4)[rank_of(plan.group)]", "return group.rank() + 1"),
    ],
    ids=["attribute and parameter", "local", "field", "condition", "returned"],
)
def test_names_are_followed_to_where_their_values_are_made(
    tmp_path: Path, expression: str, line: str
) -> None:
    assert line in find(tmp_path / "code.py", SOURCE, expression)


def test_lines_with_right_tensors_are_passed_over(tmp_path: Path) -> None:
    number = SOURCE.splitlines().index("    scale = plan.ranks / count") + 1
    found = find(tmp_path / "code.py", SOURCE, "flat * scale", right=[number])
    assert found == []


GROUPS = """
@dataclass
class Bucket:
    flat: Tensor
    group: Group

class Gather(Function):
    def forward(ctx, x, group, back):
        ctx.group, ctx.back = group, back
        return gather(x)

    def backward(ctx, grad):
        return total(grad.clone(), group=ctx.back)

class Exchange(Function):
    def forward(ctx, x, back):
        ctx.back = other(back)

def keys(x, mesh):
    groups = mesh["cp"]
    if mesh.odd:
        groups = mesh
    return Gather.apply(x, mesh["tp"], pick(groups))

def pair(x, mesh):
    Exchange.apply(x, mesh["dp"])
    launch(Bucket(x, choose(mesh)))
    store(Other(group=mesh["pp"]))

def launch(bucket: Bucket):
    reduce(bucket.flat, group=bucket.group)
"""


@pytest.mark.parametrize(
    ("expression", "lines"),
    [
        (
            "total(grad.clone(), group=ctx.back)",
            ['return Gather.apply(x, mesh["tp"], pick(groups))', "groups = mesh"],
        ),
        ("reduce(bucket.flat, group=bucket.group)", ["launch(Bucket(x, choose(mesh)))"]),
    ],
    ids=["autograd function and choice", "field of an annotated parameter"],
)
def test_a_group_is_followed_through_lines_of_tensors(
    tmp_path: Path, expression: str, lines: list[str]
) -> None:
    right = [number for number, line in enumerate(GROUPS.splitlines(), 1) if "(x" in line or "grad" in line]
    found = find(tmp_path / "code.py", GROUPS, expression, right, keyword="group")
    assert list(dict.fromkeys(found)) == lines


def test_code_that_cannot_be_read_defines_nothing(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.py")
    assert (
        Definitions([missing], lambda file, line: False).find([Site(missing, 1, "f", 0, (1, 0, 1, 3))]) == {}
    )


def test_conditions_name_what_decides_a_call_with_attributes_that_are_set_elsewhere(tmp_path: Path) -> None:
    source = """
class Norm:
    def __init__(self):
        self.tp = None

    def forward(self, x):
        return x * copy_to(self.weight, self.tp)

def copy_to(x, group):
    return x if group is None else apply(x, group)

def split(module, group):
    module.q_norm.tp = group
"""
    path = tmp_path / "norm.py"
    path.write_text(source)
    nodes = [each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.Call)]
    stack = [
        Site(
            str(path),
            each.lineno,
            "",
            0,
            (each.lineno, each.col_offset, each.lineno, each.end_col_offset or 0),
        )
        for name in ("apply", "copy_to")
        for each in nodes
        if isinstance(each.func, ast.Name) and each.func.id == name
    ]
    definitions = Definitions([str(path)], lambda file, line: line == 7)
    assert [site.line for site in definitions.find(stack, of_conditions=True)] == [7, 13]
    assert not definitions.find(stack)


LISTS = """
def choose(model, axis):
    found = []
    for name, parameter in model:
        if hasattr(parameter, "axis"):
            continue
        if "gain" in name:
            continue
        found.append(parameter)
    return found

def add_up(model, axis):
    gradients = [parameter.grad for parameter in choose(model, axis)]
    flat = join(gradients)
    reduce_all(flat, group=axis.group)

def train(mesh, model):
    add_up(model, Axis(group=mesh.group("tp")))
"""


def find_in_lists(tmp_path: Path, *, of_members: bool = False, keyword: str = "") -> list[str]:
    """Return the lines that define the arguments of the collective, or the members of its lists."""
    (path := tmp_path / "lists.py").write_text(LISTS)
    node = next(
        each
        for each in ast.walk(ast.parse(LISTS))
        if isinstance(each, ast.Call) and ast.unparse(each.func) == "reduce_all"
    )
    site = Site(
        str(path), node.lineno, "", 0, (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
    )
    definitions = Definitions([str(path)], lambda file, line: False)
    found = definitions.find_members([site]) if of_members else definitions.find([site], keyword=keyword)
    return [LISTS.splitlines()[each.line - 1].strip() for each in found]


def test_conditions_name_what_keeps_elements_out_of_a_list_that_a_call_takes(tmp_path: Path) -> None:
    found = find_in_lists(tmp_path, of_members=True)
    assert found == ['if hasattr(parameter, "axis"):', 'if "gain" in name:']


CHOSEN = """
def finish(experts, half):
    experts = [expert for number, expert in enumerate(experts) if number % 3 < 2]
    for expert in experts:
        gradient = local(expert.grad)
        gradient /= half
        reduce_all(gradient)
"""


def test_conditions_of_a_comprehension_keep_elements_out_of_a_list(tmp_path: Path) -> None:
    """`gradient /= half` leaves `gradient` a value of `expert`."""
    (path := tmp_path / "chosen.py").write_text(CHOSEN)
    site = Site(str(path), 7, "", 0, (7, 8, 7, 28))
    found = Definitions([str(path)], lambda *_: False).find_members([site])
    assert [read_expression(each) for each in found] == ["number % 3 < 2"]


def test_one_argument_of_a_call_can_be_followed_alone(tmp_path: Path) -> None:
    found = find_in_lists(tmp_path, keyword="group")
    assert found == ['add_up(model, Axis(group=mesh.group("tp")))']
    assert "flat = join(gradients)" in find_in_lists(tmp_path)


MADE = """
class Grid:
    def __init__(self, mesh):
        self.ranks = mesh.size() + 0

def step(mesh, x):
    grid = Grid(mesh) if mesh else Grid(None)
    count = len(mesh) + 0
    use(grid.ranks, count)
"""


def test_a_line_that_makes_an_object_is_followed_and_shown_only_on_demand(tmp_path: Path) -> None:
    (path := tmp_path / "made.py").write_text(MADE)
    site = Site(str(path), 9, "", 0, (9, 4, 9, 26))
    for has_objects in (False, True):
        found = Definitions([str(path)], lambda *_: False).find([site], has_objects=has_objects)
        shown = [read_expression(each) for each in found]
        assert {"mesh.size() + 0", "len(mesh) + 0"} <= set(shown)
        assert ("Grid(mesh) if mesh else Grid(None)" in shown) is has_objects
