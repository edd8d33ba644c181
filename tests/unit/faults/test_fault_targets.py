"""What a fault replaces must be there: a name that has moved would be added, and break nothing."""

import inspect

import pytest

from moeverify.faults.fault import load_faults
from moeverify.faults.restore import list_holders, restored

FAULTS = load_faults()


@pytest.mark.parametrize("number", FAULTS)
def test_a_fault_replaces_only_what_is_there(number):
    with restored():
        before = {id(holder): (holder, dict(vars(holder))) for holder in list_holders()}
        FAULTS[number].inject()
        added, replaced = [], {}
        for holder, names in before.values():
            now = dict(vars(holder))
            added += [f"{holder.__name__}.{name}" for name in now.keys() - names.keys()]
            changed = [name for name in now.keys() & names.keys() if now[name] is not names[name]]
            replaced |= {f"{holder.__name__}.{name}": (names[name], now[name]) for name in changed}
    assert added == []
    assert replaced
    assert [name for name, (old, new) in replaced.items() if not takes_the_arguments_of(old, new)] == []


def takes_the_arguments_of(old, new):
    """Return whether what replaces a function of ours takes all in order, and by name what has no default."""
    if not inspect.isfunction(old) or not callable(new) or not old.__module__.startswith("moeverify"):
        return True
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(old).parameters.values()
    positional = [each for each in parameters if each.kind in kinds]
    named = {
        each.name: each
        for each in parameters
        if each.kind is each.KEYWORD_ONLY and each.default is each.empty
    }
    try:
        inspect.signature(new).bind(*positional, **named)
    except TypeError:
        return False
    return True


@pytest.mark.parametrize("number", FAULTS)
def test_what_a_fault_has_replaced_is_put_back(number):
    before = {id(holder): (holder, dict(vars(holder))) for holder in list_holders()}
    with restored():
        FAULTS[number].inject()
    for holder, names in before.values():
        now = dict(vars(holder))
        assert [name for name in names if now[name] is not names[name]] == [], holder


def test_every_class_of_bugs_is_there():
    assert {fault.bug_class for fault in FAULTS.values()} == set("ABCDEFGHIJKLMNO")
    assert sum(fault.is_moe for fault in FAULTS.values()) >= 45
    assert sum(fault.saver is not None for fault in FAULTS.values()) >= 10
