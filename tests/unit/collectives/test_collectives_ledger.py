"""What ranks must agree in, and where they first do not."""

from __future__ import annotations

from moeverify.collectives.ledger import Entry, Ledger, Stream, describe, find_unequal, locate

TP = Stream("5", (0, 1), "tp")
DP = Stream("7", (0, 2), "dp_shard")


def make(*signatures: str, stream: Stream = TP, room: int = 100, site: str = "a.py:1 in f") -> Ledger:
    ledger = Ledger(room)
    for signature in signatures:
        ledger.note(stream, signature, site)
    return ledger


def find(*ledgers: Ledger) -> list[Stream]:
    return find_unequal([ledger.pages() for ledger in ledgers])


def disagree(*ledgers: Ledger) -> list[str]:
    counts = {
        rank: ledger.pages()[TP].number if TP in ledger.pages() else 0 for rank, ledger in enumerate(ledgers)
    }
    found = locate(TP, counts, {rank: ledger.entries(TP) for rank, ledger in enumerate(ledgers)})
    return [f"#{found.number}", *describe(found)]


def test_equal_streams_from_other_places_in_the_code_agree() -> None:
    assert find(make("a", "b", "a"), make("a", "b", "a", site="b.py:2 in g")) == []


def test_another_order_and_another_number_disagree() -> None:
    assert find(make("a", "b"), make("b", "a")) == [TP]
    assert find(make("a", "b"), make("a")) == [TP]
    assert find(make("a"), Ledger()) == [TP]


def test_ranks_outside_a_group_do_not_count() -> None:
    assert find(make("a", stream=DP), Ledger(), make("a", stream=DP)) == []
    assert find(make("a", stream=DP), make("b", stream=TP), make("b", stream=DP)) == [TP, DP]


def test_the_first_difference_is_told_with_its_places() -> None:
    assert disagree(make("a", "b", "c"), make("a", "c", site="b.py:2 in g")) == [
        "#2",
        "rank 0: b, called at a.py:1 in f",
        "rank 1: c, called at b.py:2 in g",
    ]


def test_a_rank_that_ends_early_is_told() -> None:
    assert disagree(make("a"), make("a", "b")) == [
        "#2",
        "rank 0: no further one",
        "rank 1: b, called at a.py:1 in f",
    ]


def test_a_difference_beyond_the_room_is_found_but_not_told() -> None:
    first, second = make("a", "a", "b", room=2), make("a", "a", "c", room=2)
    assert find(first, second) == [TP]
    assert disagree(first, second) == [
        "#3",
        "they agree in the first 2, and no more is kept; rank 0 issued 3, rank 1 issued 3",
    ]


def test_a_ledger_forgets() -> None:
    ledger = make("a", "b")
    ledger.clear()
    assert ledger.pages() == {}
    ledger.note(TP, "c", "d.py:1 in h")
    assert ledger.entries(TP) == [Entry("c", "d.py:1 in h")]
