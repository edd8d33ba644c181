"""Targets of `--fault`: a function with a patch, or an older one that assigns; both leave nothing behind."""

import sys
import types

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from moeverify.errors import CaseError
from moeverify.faults.assignments import assignments_undone
from moeverify.faults.catalogue import load_faults
from moeverify.faults.injection import find_fault, injected
from moeverify.model.router import Router
from moeverify.parallel import fsdp1, plan

pytestmark = pytest.mark.slow

MISSING = object()


@pytest.fixture
def own(monkeypatch):
    """Return a module like a user's module beside a case."""
    module = types.ModuleType("own_code")
    module.step = lambda: "right"
    monkeypatch.setitem(sys.modules, "own_code", module)
    return module


PLACES = [
    pytest.param(lambda own: plan, "parallelize", lambda: 0, id="a function of ours"),
    pytest.param(lambda own: Router, "forward", lambda self: 0, id="a method of ours"),
    pytest.param(lambda own: Router, "__call__", lambda self: 0, id="a method that was inherited"),
    pytest.param(lambda own: fsdp1, "STRATEGIES", {}, id="a value of ours"),
    pytest.param(lambda own: plan, "added", lambda: 0, id="a name that was not there"),
    pytest.param(lambda own: dist, "all_reduce", lambda tensor: 0, id="a function of torch"),
    pytest.param(lambda own: FSDPModule, "unshard", lambda self: 0, id="a method of torch"),
    pytest.param(lambda own: own, "step", lambda: "wrong", id="a function of the user"),
]


@pytest.mark.parametrize(("find", "name", "value"), PLACES)
def test_what_a_function_assigns_is_put_back(own, find, name, value):
    holder = find(own)
    before = vars(holder).get(name, MISSING)
    with assignments_undone(lambda: setattr(holder, name, value)):
        assert vars(holder)[name] is value
    assert vars(holder).get(name, MISSING) is before


def test_what_a_function_deletes_is_put_back():
    before = plan.parallelize
    with assignments_undone(lambda: delattr(plan, "parallelize")):
        assert not hasattr(plan, "parallelize")
    assert plan.parallelize is before


def test_an_error_puts_back_what_was_assigned_before_it():
    before = plan.parallelize

    def fail():
        plan.parallelize = len
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), assignments_undone(fail):
        pytest.fail("the block must not begin")
    assert plan.parallelize is before


def test_imports_and_what_training_sets_later_stay(own):
    def load():
        own.part = sys.modules["own_code.part"] = types.ModuleType("own_code.part")

    try:
        with assignments_undone(load):
            own.counter = 1
    finally:
        part = sys.modules.pop("own_code.part")
    assert own.part is part
    assert own.counter == 1


FAULTS = """
from moeverify.parallel import plan
from moeverify.parallel.plan import shard_mesh

def assign():
    plan.shard_mesh = lambda mesh, axis: "assigned"

def wrap(patch):
    patch.replace(shard_mesh)(lambda mesh, axis: "wrapped")

def assign_with_a_default(text="assigned"):
    plan.shard_mesh = lambda mesh, axis: text

def want_two(patch, other):
    pass
"""


@pytest.fixture
def faults(tmp_path, monkeypatch):
    (tmp_path / "own_faults.py").write_text(FAULTS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_faults", None)


@pytest.mark.usefixtures("faults")
@pytest.mark.parametrize(
    ("name", "answer"), [("assign", "assigned"), ("assign_with_a_default", "assigned"), ("wrap", "wrapped")]
)
def test_a_fault_holds_for_its_block_however_it_is_written(name, answer):
    before = plan.shard_mesh
    for _ in range(2):
        with injected(f"own_faults:{name}"):
            assert plan.shard_mesh(None, "fsdp") == answer
        assert plan.shard_mesh is before


def test_no_fault_changes_nothing():
    before = plan.shard_mesh
    with injected(None):
        assert plan.shard_mesh is before


@pytest.mark.usefixtures("faults")
def test_a_function_that_wants_more_than_a_patch_is_refused():
    with pytest.raises(CaseError, match=r"--fault: `own_faults:want_two` wants 2 arguments") as caught:
        find_fault("own_faults:want_two")
    assert "moeverify.faults.patch.Patch" in str(caught.value)


def test_a_fault_of_the_catalogue_is_found_by_its_target():
    found = find_fault("moeverify.faults.catalogue.expert_gradients:a05_fsdp2_expert_divisor")
    assert found is load_faults()["A05"]
