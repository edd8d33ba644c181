"""Wait relations between ranks, derived from traces alone, and their descriptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moeverify.report.words.collective import (
    describe_disagreement,
    describe_hang,
    describe_record,
    describe_waiting,
)
from moeverify.results.trace import CollectiveRecord
from moeverify.verification.collectives.hang import find_disagreement, find_waits


def make_record(
    op: str, sequence: int, group: list[int], state: str = "started", **more: Any
) -> CollectiveRecord:
    record = {
        "number": sequence,
        "op": op,
        "group": group,
        "group_name": str(group),
        "sequence": sequence,
        "shape": [2, 3],
        "dtype": "float32",
        "num_tensors": 1,
        "peer": -1,
        "site": f"model.py:{sequence} in forward",
        "state": state,
    }
    return CollectiveRecord.model_validate({**record, **more})


def explain_hang(
    records: Mapping[int, Sequence[CollectiveRecord]], places: Mapping[int, str]
) -> tuple[str, dict[int, str], Sequence[int]]:
    """Return a hang as text, each rank's action as text, and the ranks that the others wait for."""
    view = find_waits(records, places)
    doings = {rank: describe_waiting(waiting) for rank, waiting in view.waiting.items()}
    return describe_hang(view.hang), doings, view.late


def test_the_rank_that_never_came_is_named_with_its_place() -> None:
    everyone = [0, 1, 2, 3]
    waiting = [make_record("all_reduce", 13, everyone, "finished"), make_record("all_reduce", 14, everyone)]
    records = dict.fromkeys((0, 1, 3), waiting) | {2: waiting[:1]}
    summary, doings, late = explain_hang(records, {2: "data.py:7 in load"})
    assert summary == (
        "ranks 0, 1, 3 wait in all_reduce #14 of group (0,1,2,3) called at model.py:14 in forward; "
        "rank 2 never entered it: it is at data.py:7 in load"
    )
    assert late == [2]
    assert doings[2] == "waits in no collective, it is at data.py:7 in load"
    assert doings[0] == "waits in all_reduce #14 of group (0,1,2,3) called at model.py:14 in forward"


def test_a_rank_that_has_left_is_not_said_to_be_late_to_enter() -> None:
    records = {
        0: [make_record("broadcast", 1, [0, 1])],
        1: [make_record("broadcast", 1, [0, 1], "finished")],
    }
    summary, _, _ = explain_hang(records, {})
    assert summary.endswith("rank 1 has left it: its place is not known")


def test_opposite_orders_of_two_groups_that_a_device_has_queued() -> None:
    first = make_record("all_reduce", 3, [0, 1], group_name="a", site="train.py:1 in step")
    second = make_record("all_reduce", 3, [0, 1], group_name="b", site="train.py:2 in step")
    summary, _, late = explain_hang({0: [first, second], 1: [second, first]}, {})
    assert late == []
    for rank, (own, other) in {0: "ab", 1: "ba"}.items():
        waits = (
            f"waits in all_reduce #3 of group (0,1), named {own}, called at train.py:{'ab'.index(own) + 1}"
        )
        assert f"rank {rank} {waits}" in summary
        peer = f"rank {1 - rank} has it queued behind another collective: it waits in all_reduce #3"
        assert f"{peer} of group (0,1), named {other}, called at train.py:{'ab'.index(other) + 1}" in summary


def test_ranks_in_different_collectives_of_one_group() -> None:
    records = {
        0: [make_record("all_reduce", 1, [0, 1])],
        1: [make_record("broadcast", 1, [0, 1])],
    }
    summary, _, late = explain_hang(records, {})
    assert summary == (
        "rank 0 waits in all_reduce #1 of group (0,1) called at model.py:1 in forward; rank 1 entered another "
        "collective of that group: it waits in broadcast #1 of group (0,1) called at model.py:1 in forward. "
        "rank 1 waits in broadcast #1 of group (0,1) called at model.py:1 in forward; rank 0 entered another "
        "collective of that group: it waits in all_reduce #1 of group (0,1) called at model.py:1 in forward"
    )
    assert late == []


def test_groups_that_wait_for_each_other() -> None:
    records = {
        0: [make_record("all_reduce", 1, [0, 1])],
        1: [make_record("all_reduce", 1, [1, 2])],
        2: [make_record("all_reduce", 1, [0, 2])],
    }
    summary, _, late = explain_hang(records, {})
    assert summary.count("never entered it: it waits in") == 3
    assert late == []


def test_a_receive_waits_for_its_peer_alone() -> None:
    records: dict[int, list[CollectiveRecord]] = {
        0: [make_record("recv", 1, [0, 1, 2], peer=2)],
        1: [],
        2: [make_record("all_reduce", 4, [0, 1, 2], "finished")],
    }
    summary, _, late = explain_hang(records, {1: "a.py:1 in f", 2: "b.py:2 in g"})
    assert summary == (
        "rank 0 waits in recv #1 with peer 2 of group (0,1,2) called at model.py:1 in forward; "
        "rank 2 never entered it: it is at b.py:2 in g"
    )
    assert late == [1, 2]


def test_nobody_waits() -> None:
    summary, _, late = explain_hang({0: [], 1: []}, {0: "a.py:1 in f"})
    assert summary == (
        "no rank waits in a collective: rank 0 waits in no collective, it is at a.py:1 in f; "
        "rank 1 waits in no collective, its place is not known"
    )
    assert late == [0, 1]


def test_one_line_on_a_record() -> None:
    record = make_record("all_gather_into_tensor_coalesced", 2, [4, 5], "failed", num_tensors=3)
    assert describe_record(record) == (
        "all_gather_into_tensor_coalesced #2 of group (4,5) on float32[2, 3] and 2 more, "
        "called at model.py:2 in forward, broke off"
    )


def test_the_members_of_a_wait_are_data() -> None:
    everyone = [0, 1, 2]
    left = make_record("all_reduce", 1, everyone, "finished")
    records = {0: [make_record("all_reduce", 1, everyone)], 1: [left], 2: []}
    (wait,) = find_waits(records, {1: "a.py:1 in f"}).hang.waits
    assert wait.ranks == (0,)
    assert [(absence.rank, absence.how) for absence in wait.absent] == [(1, "has left"), (2, "never entered")]
    assert wait.absent[0].waiting.place == "a.py:1 in f"


def test_the_first_collective_in_which_ranks_differ() -> None:
    same, other = (
        [
            make_record("all_reduce", number, [0, 1], "finished", signature=sign)
            for number, sign in enumerate(signs, 1)
        ]
        for signs in ("abc", "adc")
    )
    assert find_disagreement({0: same, 1: same}) is None
    found = find_disagreement({0: same, 1: other})
    assert found is not None
    assert {rank: record.signature for rank, record in found.by_rank.items()} == {0: "b", 1: "d"}
    assert describe_disagreement(found) == (
        "the ranks disagree on collective #2 of group (0,1): rank 0 b, called at model.py:2 in forward; "
        "rank 1 d, called at model.py:2 in forward"
    )
