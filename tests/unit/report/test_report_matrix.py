"""The picture of a reshard: a row for each layout that saved, a column for each that loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from moeverify.report.next_steps import Kept, advise
from moeverify.report.text import render_run


@pytest.fixture
def show(print_at: Any) -> Any:
    def do(run: Any, width: int = 100) -> str:
        text: str = print_at(lambda console: render_run(run, console), width=width, terminal=True)
        return re.sub(r"\x1b\[[0-9;]*m", "", text)

    return do


def make_pairs(make_case: Any, names: tuple[str, ...], recipe: str = "stress") -> Iterator[Any]:
    for saver in names:
        for loader in names:
            yield make_case(
                name=f"{saver} -> {loader}",
                recipe=recipe,
                saved_by=saver,
                loaded_by=loader,
                saver_file=f"{saver}.yaml",
                verdict="skipped" if "wide" in (saver, loader) else "pass",
                findings=(),
                checks=(),
            )


def test_a_pair_that_was_skipped_is_a_dash(make_run: Any, make_case: Any, show: Any) -> None:
    lines = show(make_run(*make_pairs(make_case, ("fsdp2", "wide")))).splitlines()
    assert lines[0] == "stress: rows saved, columns loaded and trained on"
    rows = {line.split(",")[0]: line.split()[-2:] for line in lines if re.match("(fsdp2|wide), ", line)}
    assert rows == {"fsdp2": ["pass", "-"], "wide": ["-", "-"]}


def test_many_layouts_have_numbers_and_all_verdicts_fit(make_run: Any, make_case: Any, show: Any) -> None:
    names = ("single stress", *(f"a-layout-of-some-length-{number}" for number in range(9)))
    lines = show(make_run(*make_pairs(make_case, names)), width=100).splitlines()
    rows = [line for line in lines if re.match(r"\d+ ", line)]
    assert len(rows) == 10
    assert re.match(r"1 single, [1-9]\d* rank", rows[0])  # the recipe is above
    assert all(row.split().count("pass") == 10 for row in rows)


def test_what_comes_after_a_save_that_failed(make_case: Any) -> None:
    case = make_case(name="save fsdp2", file="fsdp2.yaml", saver_file="fsdp2.yaml", verdict="error")
    [(command, _)] = advise(case, "moeverify reshard fsdp2.yaml --ranks 2", Kept())
    assert command == "moeverify reshard fsdp2.yaml --ranks 2 --out runs/reshard"
