"""The collectives of a rank, by group and in order: enough to see whether the ranks of a group agree. No torch.

Ranks that meet in a collective must issue the same ones in the same order, with the same element type, and where
nothing allows other sizes with the same size. What must be the same is a `signature`; a stream is a group, or for
point-to-point a sender and a receiver in a group. Each stream has a count and a hash of all of its signatures, and
the signatures themselves, one small integer each, as far as there is room.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moeverify.results.facts import Issue

ROOM = 1 << 16
_FACTOR, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


class Stream(NamedTuple):
    """Which collectives must be the same on which ranks: all of a group's, or the messages of one pair.

    The ranks of a pair are (sender, receiver).
    """

    group: str
    ranks: tuple[int, ...]
    axis: str = ""
    is_message: bool = False


class Page(NamedTuple):
    """The count and the hash of a stream on one rank."""

    number: int
    hash: int


class Entry(NamedTuple):
    """One collective: what must be the same on all ranks, and from where it was called."""

    signature: str
    site: str


@dataclass(frozen=True)
class Disagreement:
    """The first collective of a stream in which ranks differ: its number from 1, and what each rank has there.

    An entry is None where the rank issued no further collective, and where that is no longer known: `is_known`.
    """

    stream: Stream
    number: int
    entries: Mapping[int, Entry | None]
    counts: Mapping[int, int]
    is_known: bool = True

    def list_issues(self) -> tuple[Issue, ...]:
        """Return what was issued at the place where ranks differ, that of most ranks first; nothing if not known."""
        if not self.is_known:
            return ()
        ranks_of: dict[Entry | None, list[int]] = {}
        for rank, entry in self.entries.items():
            ranks_of.setdefault(entry, []).append(rank)
        return tuple(
            Issue(ranks=tuple(ranks), signature=entry.signature, site=entry.site)
            if entry is not None
            else Issue(ranks=tuple(ranks), signature=None)
            for entry, ranks in sorted(ranks_of.items(), key=lambda item: -len(item[1]))
        )

    def find_odd(self) -> int:
        """Return a rank that does what the fewest do."""
        groups: dict[str, list[int]] = {}
        for rank, entry in self.entries.items():
            groups.setdefault(entry.signature if entry is not None else "", []).append(rank)
        return min(groups.values(), key=lambda members: (len(members), -members[0]))[0]


class Ledger:
    """The streams of this rank since the last `clear`. Not thread-safe by itself."""

    def __init__(self, room: int = ROOM) -> None:
        self._room = room
        self._pages: dict[Stream, list[int]] = {}
        self._entries: dict[Stream, array[int]] = {}
        self._kinds: dict[Entry, tuple[int, int]] = {}
        self._names: list[Entry] = []

    def note(self, stream: Stream, signature: str, site: str) -> int:
        """Take in the next collective of a stream, and return its number in it, from 1."""
        kind = self._kinds.get((signature, site))  # type: ignore[call-overload]  # a tuple is equal to the entry
        if kind is None:
            kind = self._learn(Entry(signature, site))
        page = self._pages.get(stream)
        if page is None:
            page = self._pages[stream] = [0, 0]
            self._entries[stream] = array("I")
        page[0] += 1
        page[1] = (page[1] * _FACTOR + kind[1]) & _MASK
        if page[0] <= self._room:
            self._entries[stream].append(kind[0])
        return page[0]

    def clear(self) -> None:
        """Forget everything."""
        self._pages.clear()
        self._entries.clear()
        self._kinds.clear()
        self._names.clear()

    def pages(self) -> dict[Stream, Page]:
        """Return count and hash of every stream."""
        return {stream: Page(*page) for stream, page in self._pages.items()}

    def entries(self, stream: Stream) -> list[Entry]:
        """Return the first collectives of a stream, as many as there was room for."""
        return [self._names[number] for number in self._entries.get(stream, ())]

    def _learn(self, entry: Entry) -> tuple[int, int]:
        digest = hashlib.blake2b(entry.signature.encode(), digest_size=8).digest()
        known = self._kinds[entry] = (len(self._names), int.from_bytes(digest) | 1)
        self._names.append(entry)
        return known


def find_unequal(by_rank: Sequence[Mapping[Stream, Page]]) -> list[Stream]:
    """Return the streams whose ranks differ in count or hash; of ranks that are not here nothing is said."""
    streams = sorted({stream for pages in by_rank for stream in pages})
    return [
        stream
        for stream in streams
        if len({by_rank[rank].get(stream, Page(0, 0)) for rank in stream.ranks if rank < len(by_rank)}) > 1
    ]


def locate(stream: Stream, counts: Mapping[int, int], entries: Mapping[int, Sequence[Entry]]) -> Disagreement:
    """Return the first collective in which the ranks of a stream differ, from what each has kept of it."""
    longest = max(map(len, entries.values()), default=0)
    for position in range(longest):
        here = {rank: kept[position] if position < len(kept) else None for rank, kept in entries.items()}
        if len({entry.signature if entry is not None else None for entry in here.values()}) > 1:
            return Disagreement(stream, position + 1, here, counts)
    return Disagreement(stream, longest + 1, dict.fromkeys(entries), counts, is_known=False)
