"""Fields in which ranks must agree, and the first disagreement."""

from __future__ import annotations

from moeverify.verification.collectives.ledger import (
    Ledger,
    LedgerEntry,
    Stream,
    StreamMismatch,
    find_unequal,
    locate,
)

TP = Stream("5", (0, 1), "tp")
DP = Stream("7", (0, 2), "dp_shard")


def make(*signatures: str, stream: Stream = TP, room: int = 100, site: str = "a.py:1 in f") -> Ledger:
    ledger = Ledger(room)
    for signature in signatures:
        ledger.note(stream, signature, site)
    return ledger


def find(*ledgers: Ledger) -> list[Stream]:
    return find_unequal([ledger.pages() for ledger in ledgers])


def disagree(*ledgers: Ledger) -> StreamMismatch:
    counts = {
        rank: ledger.pages()[TP].number if TP in ledger.pages() else 0 for rank, ledger in enumerate(ledgers)
    }
    return locate(TP, counts, {rank: ledger.entries(TP) for rank, ledger in enumerate(ledgers)})


def test_equal_streams_from_other_places_in_the_code_agree() -> None:
    assert find(make("a", "b", "a"), make("a", "b", "a", site="b.py:2 in g")) == []


def test_another_order_and_another_number_disagree() -> None:
    assert find(make("a", "b"), make("b", "a")) == [TP]
    assert find(make("a", "b"), make("a")) == [TP]
    assert find(make("a"), Ledger()) == [TP]


def test_ranks_outside_a_group_do_not_count() -> None:
    assert find(make("a", stream=DP), Ledger(), make("a", stream=DP)) == []
    assert find(make("a", stream=DP), make("b", stream=TP), make("b", stream=DP)) == [TP, DP]


def test_the_first_difference_is_found_with_its_places() -> None:
    found = disagree(make("a", "b", "c"), make("a", "c", site="b.py:2 in g"))
    assert (found.number, found.is_known) == (2, True)
    assert found.entries == {0: LedgerEntry("b", "a.py:1 in f"), 1: LedgerEntry("c", "b.py:2 in g")}


def test_a_rank_that_ends_early_has_no_entry() -> None:
    found = disagree(make("a"), make("a", "b"))
    assert (found.number, found.is_known) == (2, True)
    assert found.entries == {0: None, 1: LedgerEntry("b", "a.py:1 in f")}


def test_a_difference_beyond_the_room_is_found_but_not_its_place() -> None:
    first, second = make("a", "a", "b", room=2), make("a", "a", "c", room=2)
    assert find(first, second) == [TP]
    found = disagree(first, second)
    assert (found.number, found.is_known, found.counts) == (3, False, {0: 3, 1: 3})


def test_messages_of_both_directions_are_two_streams() -> None:
    there, back = Stream("5", (0, 1), "pp", is_message=True), Stream("5", (1, 0), "pp", is_message=True)
    assert find(make("a", stream=there), make("a", stream=back)) == [there, back]


def test_a_ledger_forgets() -> None:
    ledger = make("a", "b")
    ledger.clear()
    assert ledger.pages() == {}
    ledger.note(TP, "c", "d.py:1 in h")
    assert ledger.entries(TP) == [LedgerEntry("c", "d.py:1 in h")]
