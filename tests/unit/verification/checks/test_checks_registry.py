"""Each name has a check, each kind of tensor is examined once, and optional checks run on request only."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moeverify.results.checks import UNCOMPARED_KINDS, CheckName, Kind
from moeverify.verification.checks import base
from moeverify.verification.checks.base import Check, Role
from moeverify.verification.checks.registry import CHECKS, KIND_ORDER, check_of, choose_checks

FOLDER = Path(base.__file__).parent


def test_every_name_has_one_check_in_the_order_of_the_names() -> None:
    assert [check.name for check in CHECKS] == list(CheckName)
    assert all(name.description for name in CheckName)


def test_every_kind_that_is_shown_is_compared_by_one_check() -> None:
    kinds = [kind for check in CHECKS for kind in check.kinds]
    assert len(kinds) == len(set(kinds))
    assert set(kinds) >= set(Kind) - UNCOMPARED_KINDS
    assert not set(kinds) & UNCOMPARED_KINDS
    for kind in kinds:
        assert kind in check_of(kind).kinds


def test_kinds_come_in_the_order_of_a_step() -> None:
    known = [kind for kind in Kind if kind in KIND_ORDER]
    order = sorted(KIND_ORDER, key=KIND_ORDER.__getitem__)
    assert order.index(Kind.INITIAL_WEIGHT) < order.index(Kind.ROUTER_IDS) < order.index(Kind.LOSS)
    assert order.index(Kind.LOSS) < order.index(Kind.GRADIENT) < order.index(Kind.UPDATE)
    assert set(known) <= set(order)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_only_optional_checks_show_more_and_each_is_a_file_of_its_name(check: Check) -> None:
    """Tensors of a check are in the full golden, whose name includes the optional checks and their code."""
    if type(check).show is not Check.show:
        assert check.name.is_optional
    if check.name.is_optional:
        assert (FOLDER / f"{check.name.replace(' ', '_')}.py").is_file()


def test_skipped_checks_are_not_made_and_optional_ones_only_if_asked_for() -> None:
    usual = [name for name in CheckName if not name.is_optional]
    assert [check.name for check in choose_checks()] == usual
    assert [check.name for check in choose_checks(skip=["trace"])] == [
        name for name in usual if name != CheckName.TRACE
    ]
    optional = [name for name in CheckName if name.is_optional]
    assert [check.name for check in choose_checks(also=optional)] == list(CheckName)


def test_what_stands_for_itself_and_what_follows() -> None:
    roles = {check.name: check.role for check in CHECKS}
    assert {name for name, role in roles.items() if role is Role.CONSEQUENCE} == {CheckName.REPEAT}
    assert {name for name, role in roles.items() if role is Role.ORIGIN} >= {
        CheckName.COVERAGE,
        CheckName.SHARDING,
        CheckName.TRACE,
        CheckName.PRECISION,
    }
    assert roles[CheckName.GRADIENT] is Role.DIAGNOSED


def test_the_page_on_checks_has_every_check_with_its_description() -> None:
    page = (FOLDER.parents[2] / "docs" / "reference" / "checks.md").read_text()
    rows = re.findall(r"^\| `([a-z0-9 ]+)` \| (.+) \|$", page, re.MULTILINE)
    wanted = [(name.value, name.description) for name in CheckName]
    assert [(name, text.partition("; only where")[0]) for name, text in rows] == wanted
    assert {name for name, text in rows if "`checks.also`" in text} == {
        name for name in CheckName if name.is_optional
    }
