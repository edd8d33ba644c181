"""What a fault replaces must be there: a name that has moved would be added, and break nothing."""

import pytest

from moeverify.faults.fault import load_faults
from moeverify.faults.restore import list_holders, restored

FAULTS = load_faults()


@pytest.mark.parametrize("number", FAULTS)
def test_a_fault_replaces_only_what_is_there(number):
    with restored():
        before = {id(holder): (holder, dict(vars(holder))) for holder in list_holders()}
        FAULTS[number].inject()
        added, replaced = [], []
        for holder, names in before.values():
            now = dict(vars(holder))
            added += [f"{holder.__name__}.{name}" for name in now.keys() - names.keys()]
            replaced += [name for name in now.keys() & names.keys() if now[name] is not names[name]]
    assert added == []
    assert replaced


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
