"""The picture of a failure: ranks per collective, missing ranks, and the order of columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from moeverify.report.meetings import align_records
from moeverify.report.pictures.picture import Picture, drawing, format_svg
from moeverify.report.pictures.registry import draw_case
from moeverify.results.failure import EndKind, RankEnd
from moeverify.results.run import RankReport
from moeverify.results.trace import CollectiveRecord

WORLD, PAIRS = (0, 1, 2, 3), ((0, 1), (2, 3))


def make_record(number: int, op: str, group: tuple[int, ...], sequence: int, **rest: Any) -> CollectiveRecord:
    content = {"state": "finished", "signature": op, "group_name": f"g{group}", **rest}
    return CollectiveRecord.model_validate(
        {"number": number, "op": op, "group": group, "sequence": sequence, **content}
    )


def make_trace(rank: int, num_finished: int, state: str = "finished") -> list[CollectiveRecord]:
    """Return the records of a step: one of the pair, one of the world, one of the pair in `state`."""
    pair = PAIRS[rank // 2]
    steps = (("all_to_all", pair, 1), ("all_reduce", WORLD, 1), ("all_gather", pair, 2))
    records = [make_record(at + 1, *step, axis="") for at, step in enumerate(steps[:num_finished])]
    return [*records[:-1], records[-1].model_copy(update={"state": state})]


def list_columns(traces: Mapping[int, Sequence[CollectiveRecord]]) -> list[tuple[str, list[int], list[int]]]:
    return [
        (next(iter(each.records.values())).op, sorted(each.records), sorted(each.missing))
        for each in align_records(traces)
    ]


def test_ranks_meet_in_one_column_and_the_missing_one_is_named() -> None:
    traces = {rank: make_trace(rank, 2, "started") for rank in (0, 2, 3)} | {1: make_trace(1, 1)}
    assert list_columns(traces) == [
        ("all_to_all", [0, 1], []),
        ("all_to_all", [2, 3], []),
        ("all_reduce", [0, 2, 3], [1]),
    ]


def test_a_rank_that_came_early_stands_with_those_that_came_late() -> None:
    traces = {0: make_trace(0, 2), 2: [make_record(1, "all_reduce", WORLD, 1)]}
    assert list_columns(traces) == [("all_to_all", [0], []), ("all_reduce", [0, 2], [])]


def test_a_rank_that_went_on_is_not_missing() -> None:
    """Rank 2 keeps its last record only, of a later sequence of the group that rank 3 waits in."""
    later = make_record(9, "all_gather", PAIRS[1], 7)
    traces = {2: [later], 3: [make_record(4, "all_gather", PAIRS[1], 6, state="started")]}
    assert [missing for _, _, missing in list_columns(traces)] == [[], []]


def test_ranks_in_one_collective_that_issued_different_ones_disagree() -> None:
    traces = {rank: make_trace(rank, 3) for rank in (0, 1)}
    other = make_record(3, "reduce_scatter", PAIRS[0], 2, state="started")
    (meeting,) = [each for each in align_records(traces | {1: [*traces[1][:2], other]}) if each.disagrees]
    assert {rank: record.op for rank, record in meeting.records.items()} == {
        0: "all_gather",
        1: "reduce_scatter",
    }


def test_orders_that_contradict_each_other_come_to_an_end() -> None:
    one, two = ("all_reduce", (0, 1), 1), ("broadcast", WORLD, 1)
    traces = {
        0: [make_record(1, *one), make_record(2, *two)],
        1: [make_record(1, *two), make_record(2, *one)],
    }
    columns = [sorted(each.records) for each in align_records(traces)]
    assert sum(map(len, columns)) == 4


def test_a_message_meets_its_receiver_and_no_other_one() -> None:
    send = make_record(1, "send", WORLD, 1, peer=1, state="started")
    receive = make_record(1, "recv", WORLD, 1, peer=0, state="finished")
    other = make_record(1, "recv", WORLD, 1, peer=3, state="started")
    assert list_columns({0: [send], 1: [receive], 2: [other], 3: []}) == [
        ("send", [0, 1], []),
        ("recv", [2], [3]),
    ]


@pytest.fixture(scope="module")
def picture() -> Picture:
    from moeverify.results.run import CaseResult

    traces = {rank: make_trace(rank, 2, "started") for rank in (0, 2, 3)} | {1: make_trace(1, 1)}
    ends = {rank: RankEnd(how=EndKind.STOPPED) for rank in (0, 2, 3)} | {
        1: RankEnd(how=EndKind.KILLED, signal=9)
    }
    case = CaseResult(
        name="ep2",
        file="cases/ep2.yaml",
        verdict="error",
        ranks=4,
        seconds=1.0,
        rank_reports=tuple(
            RankReport.of(rank, ends[rank], recent=tuple(traces[rank])) for rank in (1, 0, 2, 3)
        ),
    )
    with drawing():
        return dict(draw_case(case))["last-collectives"]


def test_the_picture_marks_the_rank_that_others_wait_for(picture: Picture) -> None:
    root = ET.fromstring(format_svg(picture, "a"))
    texts = ["".join(each.itertext()) for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("missing") == 1
    assert picture.caption.startswith(
        "all_reduce #1 of group (0,1,2,3) is not over on ranks 0, 2, 3; missing: rank 1 (killed)."
    )
