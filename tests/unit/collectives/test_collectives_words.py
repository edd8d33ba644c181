"""A hang in words, from traces alone."""

from __future__ import annotations

from typing import Any

from moeverify.collectives.words import describe_record, explain_hang


def make_record(
    op: str, sequence: int, group: list[int], state: str = "started", **more: Any
) -> dict[str, Any]:
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
    return {**record, **more}


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
    assert summary.endswith("rank 1 has left it: where it is, is not known")


def test_ranks_in_different_collectives_of_one_group() -> None:
    records = {
        0: [make_record("all_reduce", 1, [0, 1])],
        1: [make_record("broadcast", 1, [0, 1])],
    }
    summary, _, late = explain_hang(records, {})
    assert summary == (
        "rank 0 waits in all_reduce #1 of group (0,1) called at model.py:1 in forward; rank 1 entered another "
        "one of that group: it waits in broadcast #1 of group (0,1) called at model.py:1 in forward. "
        "rank 1 waits in broadcast #1 of group (0,1) called at model.py:1 in forward; rank 0 entered another "
        "one of that group: it waits in all_reduce #1 of group (0,1) called at model.py:1 in forward"
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
    records: dict[int, list[dict[str, Any]]] = {
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
        "rank 1 waits in no collective, where it is, is not known"
    )
    assert late == [0, 1]


def test_one_line_on_a_record() -> None:
    record = make_record("all_gather_into_tensor_coalesced", 2, [4, 5], "failed", num_tensors=3)
    assert describe_record(record) == (
        "all_gather_into_tensor_coalesced #2 of group (4,5) on float32[2, 3] and 2 more, "
        "called at model.py:2 in forward, broke off"
    )
