"""Descriptors of axes agree with the schema and with each other, and a new axis is one descriptor."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moeverify.cases.axes.axis import VIEWS
from moeverify.cases.axes.mesh import MeshPlan
from moeverify.cases.axes.registry import AXES, AXIS_OF, DEGREES, EXPERT_AXES
from moeverify.cases.schema import Layout, MoE, ReferenceModel

ROOT = Path(__file__).parents[4]

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"pp": 2, "dp_replicate": 2, "dp_shard": 3, "cp": 2, "tp": 2},
    {"dp_shard": 4, "tp": 2, "ep": 4, "etp": 2},
    {"dp_replicate": 4, "ep": 2, "data_parallel": "ddp"},
]


def test_names_are_unique_and_degrees_are_fields_of_a_layout() -> None:
    assert len(AXIS_OF) == len(AXES)
    assert {axis.degree for axis in DEGREES} <= set(Layout.model_fields)
    assert all(axis.name == axis.degree for axis in DEGREES)


def test_each_axis_that_a_field_sets_has_a_file_of_its_own() -> None:
    folder = ROOT / "moeverify" / "cases" / "axes"
    assert [axis.name for axis in DEGREES if not (folder / f"{axis.name}.py").is_file()] == []


@pytest.mark.parametrize("degrees", LAYOUTS)
def test_the_data_view_has_all_ranks_and_the_rows_those_that_split_them(degrees: dict[str, Any]) -> None:
    layout = Layout(**degrees)
    plan = MeshPlan.of(layout)
    assert {getattr(plan, view).world_size for view in VIEWS} == {layout.world_size}
    rows = math.prod(axis.size(layout) for axis in AXES if axis.batch_dim == "rows")
    positions = math.prod(axis.size(layout) for axis in AXES if axis.batch_dim == "positions")
    assert (rows, positions) == (layout.data_ranks, layout.cp)
    assert plan.view_of("loss").axes["loss"] == rows * positions


@pytest.mark.parametrize("degrees", LAYOUTS)
def test_shares_of_rows_are_counted_in_the_order_of_the_mesh(degrees: dict[str, Any]) -> None:
    layout = Layout(**degrees)
    plan = MeshPlan.of(layout)
    shares = [plan.row_share(rank) for rank in range(layout.world_size)]
    assert set(shares) == set(range(layout.data_ranks))
    for rank, share in enumerate(shares):
        place = plan.data.coordinates(rank)
        assert share == place["dp_replicate"] * layout.dp_shard + place["dp_shard"]


def test_sizes_are_fields_of_the_reference_model() -> None:
    for axis in AXES:
        for size in axis.sizes:
            section, _, name = size.path.rpartition(".")
            known = {"model": ReferenceModel, "model.moe": MoE}[section]
            assert name in known.model_fields, size


def test_axes_that_place_experts_are_in_the_sparse_view_alone() -> None:
    for axis in AXES:
        views = {view for kind in ("ddp", "fsdp2") for view in axis.views(Layout(data_parallel=kind))}
        assert (axis.name in EXPERT_AXES) == (views == {"sparse"}), axis.name


def test_unions_are_not_set_by_a_field() -> None:
    assert {axis.name for axis in AXES if axis.is_union} == {"fsdp", "loss"}
    assert not any(axis.is_union and axis.degree for axis in AXES)


DESCRIPTOR = '''"""The axis of a test: its ranks see other rows."""

from __future__ import annotations

from moeverify.cases.axes.axis import Axis, Divided
from moeverify.results.checks import Kind

AXIS = Axis(
    name="island",
    degree="island",
    size=lambda layout: layout.island,
    views=lambda _: ("data", "dense", "sparse", "loss"),
    batch_dim="rows",
    divides=Divided(Kind.TOKEN_LOSS),
    is_varied=True,
)
'''
FIELD = "    dp_shard: RowDegree = Field("
ASKING = """
from moeverify.cases.axes.claims import axis_claims
from moeverify.cases.axes.groups import axis_affects, list_degrees, list_groups
from moeverify.cases.axes.mesh import MeshPlan
from moeverify.faults.setting import make_case
from moeverify.cases.validation.rules import validate

case = make_case("a", island=3, tp=2)
plan = MeshPlan.of(case.layout)
print(case.layout.world_size, case.layout.data_ranks)
print(*plan.data.axes, "/", *plan.sparse.axes)
print(plan.coordinates(3), plan.row_share(3))
print("island" in list_groups(case), list_degrees(case)["island"], "island" in axis_claims(case, plan))
print(axis_affects(case, "island", "embed.weight"))
for problem in validate(case):
    print(problem.path, problem.message)
custom = make_case("b", data={"batch": 12}, island=3)
print(validate(custom))
"""


def test_an_axis_is_a_descriptor_a_line_and_a_field(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "moeverify", tmp_path / "moeverify", ignore=shutil.ignore_patterns("__pycache__"))
    axes, schema = tmp_path / "moeverify/cases/axes", tmp_path / "moeverify/cases/schema.py"
    (axes / "island.py").write_text(DESCRIPTOR)
    registry = (axes / "registry.py").read_text()
    registry = registry.replace("import cp,", "import island, cp,").replace(
        "    pp.AXIS,\n", "    pp.AXIS,\n    island.AXIS,\n"
    )
    (axes / "registry.py").write_text(registry)
    text = schema.read_text()
    assert FIELD in text
    schema.write_text(
        text.replace(FIELD, f'    island: RowDegree = Field(default=1, description="a")\n{FIELD}')
    )
    done = subprocess.run(
        [sys.executable, "-c", ASKING],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "6 3",
        "pp island dp_replicate dp_shard cp tp / pp island dp_replicate efsdp ep etp",
        "{'island': 1, 'tp': 1, 'etp': 1} 1",
        "True 3 True",
        "True",
        "layout.island recipe.data.batch 8 is not divisible by island 3",
        "[]",
    ]
