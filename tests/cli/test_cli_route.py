"""`moeverify route`: where the tokens of a batch are computed, against the rows that experts received."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from moeverify.results.route import RouteReport

Invoke = Callable[..., Any]

CASES = Path(__file__).parents[2] / "cases"
FAULT = """\
from moeverify.faults.patch import Original, Patch


def inject(patch):
    from moeverify.parallel import expert

    @patch.wrap(expert.order_by_expert)
    def give_rows_to_the_next(original, arriving, num_rows):
        there, back = original(arriving, num_rows)
        return there.roll(1), back
"""


def _read(path: Path) -> list[RouteReport]:
    return TypeAdapter(list[RouteReport]).validate_json(path.read_bytes())


@pytest.mark.ranks
def test_each_copy_is_computed_where_its_expert_is(tmp_path: Path, invoke: Invoke) -> None:
    file = tmp_path / "route.json"
    cases = [CASES / "ddp-ep2.yaml", CASES / "ep2-padded.yaml"]
    done = invoke("route", *cases, "--device", "cpu", "--tokens", 3, "--json", file)
    assert done.exit_code == 0, done.output
    reports = _read(file)
    assert [report.case for report in reports] == ["ddp-ep2", "ep2-padded"]
    for found in [report.result for report in reports]:
        assert found is not None
        assert found.is_right
        assert found.combine is not None
        assert found.combine.num_tokens == 6
        assert sum(map(sum, found.sent)) == found.num_copies > 0
        # A column of the sent counts equals the rows that the rank's experts computed.
        for rank, by_expert in enumerate(found.computed):
            assert sum(by_expert.values()) == sum(row[rank] for row in found.sent)
            assert {expert * 2 // found.num_experts for expert in by_expert} == {rank}
        for token in found.tokens:
            assert len(token.choices) == found.top_k
            for choice in token.choices:
                assert choice.rank == choice.expert * 2 // found.num_experts
    assert "0 dropped, 0 computed that nobody chose" in done.stdout


@pytest.mark.ranks
def test_rows_that_come_to_the_wrong_expert_are_seen(
    tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_exchange.py").write_text(FAULT)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "route.json"
    words = ("--fault", "odd_exchange:inject", "--device", "cpu", "--step", 1, "--layer", 2, "--json", file)
    done = invoke("route", CASES / "ddp-ep2.yaml", *words)
    assert done.exit_code == 1, done.output
    (report,) = _read(file)
    assert report.result is not None
    assert (report.result.layer, report.result.step) == (2, 1)
    assert report.result.num_lost == report.result.num_surplus > 0
    assert report.result.combine is not None
    assert not report.result.combine.is_right
    assert done.stdout.count("MISMATCH") == 2
    assert "LOST" in done.stdout or report.result.num_lost < 20


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ((CASES / "ddp-ep2.yaml", "--layer", 0), ["--layer: layer 0 has no experts", "write one of 1, 2"]),
        ((CASES / "ddp-ep2.yaml", "--step", 99), ["--step: the recipe has"]),
        ((CASES / "megablocks-ep2.yaml",), ["layout.experts: the package's own block"]),
        ((CASES.parent / "examples/my_gpt/tp.yaml",), ["recipe.model: a model or parallel code of your own"]),
        ((CASES / "none.yaml",), ["there is no such file"]),
    ],
)
def test_cases_that_cannot_be_followed_are_refused(
    invoke: Invoke, words: tuple[Any, ...], wrong: list[str]
) -> None:
    done = invoke("route", *words)
    assert done.exit_code == 2, done.output
    for each in wrong:
        assert each in done.output
