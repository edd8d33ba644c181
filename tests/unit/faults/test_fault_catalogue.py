"""Invariants of the fault catalogue: declared seams, fault classes, and no torch before the injection."""

import gc
import operator
import re
import subprocess
import sys
from functools import reduce
from pathlib import Path
from types import FrameType, ModuleType

import pytest

import moeverify.verification.worker.main  # everything that runs on a rank  # noqa: F401
from moeverify.faults import catalogue
from moeverify.faults.catalogue import load_classes, load_faults
from moeverify.faults.injection import find_fault
from moeverify.faults.null import reverse_reductions
from moeverify.faults.patch import Patch
from moeverify.seams import SEAMS

pytestmark = pytest.mark.slow

FAULTS = load_faults()


def name_of(function):
    return f"{function.__module__}.{function.__qualname__}"


def snapshot():
    """Return the state of modules and classes that faults change: this project's and torch.distributed's."""
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith(("moeverify.", "torch.distributed")) and isinstance(module, ModuleType)
    ]
    classes = [
        value
        for module in modules
        for value in list(vars(module).values())
        if issubclass(type(value), type) and value.__module__ == module.__name__
    ]
    return [(holder, dict(vars(holder))) for holder in (*modules, *classes)]


def differences(before):
    found = []
    for holder, names in before:
        now = vars(holder)
        # A hundred thousand values for each fault: `map` compares them without a frame each.
        if not all(map(operator.is_, map(now.get, names), names.values())):
            found += [
                f"{holder.__name__}.{name}" for name, value in names.items() if now.get(name) is not value
            ]
    return found


@pytest.fixture(scope="module")
def before():
    """Return the contents without a fault, after all imports of faults."""
    for fault in FAULTS.values():
        with Patch() as patch:
            fault.inject(patch)
    return snapshot()


@pytest.mark.parametrize("number", FAULTS)
def test_a_fault_wraps_declared_seams_and_functions_of_torch_alone_and_is_undone(number, before):
    with Patch() as patch:
        FAULTS[number].inject(patch)
        names = [name_of(function) for function in patch.functions]
        assert differences(before) != []
    assert names
    assert [name for name in names if name not in SEAMS and not name.startswith("torch.")] == []
    assert differences(before) == []


def test_the_null_fault_wraps_a_seam_and_is_undone(before):
    with Patch() as patch:
        reverse_reductions(patch)
        assert [name_of(function) for function in patch.functions] == [
            "moeverify.parallel.collectives.sum_over"
        ]
        assert differences(before) == ["moeverify.parallel.collectives.sum_over"]
    assert differences(before) == []


@pytest.mark.parametrize("name", SEAMS)
def test_a_seam_is_public_and_stands_under_its_own_name(name):
    function = SEAMS[name]
    path = function.__qualname__.split(".")
    assert [part for part in path if part[0] == "_" and not part.endswith("__")] == []
    assert reduce(getattr, path, sys.modules[function.__module__]) is function


def test_seams_are_known_to_modules_and_classes_alone():
    # A patch replaces a function in modules and in its class; it would miss one in a table or a default.
    gc.collect()
    namespaces = {id(vars(module)) for module in list(sys.modules.values()) if isinstance(module, ModuleType)}
    seams = list(SEAMS.values())
    known = {id(function) for function in seams}
    for place in gc.get_referrers(*seams):
        if id(place) in namespaces or place is seams or place is SEAMS or isinstance(place, FrameType):
            continue
        if isinstance(place, dict) and "__spec__" in place:
            continue  # a test module that pytest has imported under a reused name
        for function in [held for held in gc.get_referents(place) if id(held) in known]:
            is_class = isinstance(place, dict) and place.get("__module__") == function.__module__
            assert is_class, f"a patch would miss calls of {name_of(function)} by {str(place)[:100]}"


def test_every_class_of_bugs_is_there_under_a_name_of_its_own():
    classes = load_classes()
    assert "".join(each.letter for each in classes) == "ABCDEFGHIJKLMNOP"
    assert {fault.bug_class for fault in FAULTS.values()} == set("ABCDEFGHIJKLMNOP")
    assert all(each.faults and each.title for each in classes)
    assert list(FAULTS) == sorted(FAULTS)
    assert sum(fault.is_moe for fault in FAULTS.values()) >= 45
    assert sum(fault.saver is not None for fault in FAULTS.values()) >= 10


def test_every_fault_of_a_file_is_found():
    files = Path(catalogue.__file__).parent.rglob("*.py")
    assert sum(path.read_text().count("@fault(") for path in files) == len(FAULTS) >= 100


def test_a_fault_is_found_by_its_target_which_is_named_after_it_in_the_module_of_its_class():
    for each in load_classes():
        for fault in each.faults:
            module, _, name = fault.target.partition(":")
            assert module.endswith(f".catalogue.{each.name}")
            assert name.startswith(f"{fault.number.lower()}_")
            assert find_fault(fault.target) is fault


def test_a_list_of_all_faults_needs_no_torch():
    program = (
        "import sys\n"
        "from moeverify.faults.choice import choose_faults, describe\n"
        "lines = [describe(fault) for fault in choose_faults([])]\n"
        "assert len(lines) >= 100\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_page_on_faults_names_seams_and_classes_that_are_there():
    page = (Path(__file__).parents[3] / "docs" / "diagnosis.md").read_text()
    named = re.findall(r"`((?:model|parallel|train|tools)(?:\.\w+)+)`", page)
    assert len(named) > 20
    assert [name for name in named if f"moeverify.{name}" not in SEAMS] == []
    classes = re.findall(r"^\| ([A-P]) `(\w+)` \|", page, re.MULTILINE)
    assert classes == [(each.letter, each.name) for each in load_classes()]
