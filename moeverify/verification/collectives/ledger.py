"""Record of a rank's collectives by group and in order, to detect disagreement. Does not import torch.

The ranks of a group must issue the same collectives in the same order, with the same dtype and, unless
other sizes are allowed, the same size. A `signature` holds these properties. A stream is a group, or a
(sender, receiver) pair for point-to-point messages. Each stream has a count and a hash of all signatures.
The signatures themselves are kept as one small integer each, up to a limit.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moeverify.results.facts import CollectiveFacts, Issue

ROOM = 1 << 16
_FACTOR, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


class Stream(NamedTuple):
    """Collectives that must agree on some ranks: all of a group, or the messages of one pair.

    The ranks of a pair are (sender, receiver).
    """

    group: str
    ranks: tuple[int, ...]
    axis: str = ""
    is_message: bool = False


class Page(NamedTuple):
    """The count and hash of a stream on one rank."""

    number: int
    hash: int


class LedgerEntry(NamedTuple):
    """One collective: the properties that must agree on all ranks, and the call site."""

    signature: str
    site: str


@dataclass(frozen=True)
class StreamMismatch:
    """The first collective of a stream in which ranks differ: its number, from 1, and the entry of each rank.

    An entry is None if the rank issued no further collective. If `is_known` is false, the entries were no
    longer kept.
    """

    stream: Stream
    number: int
    entries: Mapping[int, LedgerEntry | None]
    counts: Mapping[int, int]
    is_known: bool = True

    def _list_issues(self) -> tuple[Issue, ...]:
        """Return the collectives issued at the disagreement, most common first, or () if they are unknown."""
        if not self.is_known:
            return ()
        ranks_of: dict[LedgerEntry | None, list[int]] = {}
        for rank, entry in self.entries.items():
            ranks_of.setdefault(entry, []).append(rank)
        return tuple(
            Issue(ranks=tuple(ranks), signature=entry.signature, site=entry.site)
            if entry is not None
            else Issue(ranks=tuple(ranks), signature=None)
            for entry, ranks in sorted(ranks_of.items(), key=lambda item: -len(item[1]))
        )

    def describe(self, axis: str) -> CollectiveFacts:
        """Return the facts for a finding; `axis` names the mesh axis of the stream."""
        return CollectiveFacts(
            axis=axis,
            ranks=self.stream.ranks,
            number=self.number,
            issues=self._list_issues(),
            counts=dict(self.counts),
            is_message=self.stream.is_message,
            group=self.stream.group,
        )

    def find_odd(self) -> int:
        """Return a rank that issued the rarest collective."""
        groups: dict[str, list[int]] = {}
        for rank, entry in self.entries.items():
            groups.setdefault(entry.signature if entry is not None else "", []).append(rank)
        return min(groups.values(), key=lambda members: (len(members), -members[0]))[0]


class Ledger:
    """The streams of this rank since the last `clear`. Not thread-safe."""

    def __init__(self, room: int = ROOM) -> None:
        self._room = room
        self._pages: dict[Stream, list[int]] = {}
        self._entries: dict[Stream, array[int]] = {}
        self._kinds: dict[LedgerEntry, tuple[int, int]] = {}
        self._names: list[LedgerEntry] = []

    def note(self, stream: Stream, signature: str, site: str) -> int:
        """Record the next collective of a stream, and return its number in the stream, from 1."""
        kind = self._kinds.get((signature, site))  # type: ignore[call-overload]  # a tuple equals it
        if kind is None:
            kind = self._learn(LedgerEntry(signature, site))
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
        """Remove all streams."""
        self._pages.clear()
        self._entries.clear()
        self._kinds.clear()
        self._names.clear()

    def pages(self) -> dict[Stream, Page]:
        """Return the count and hash of every stream."""
        return {stream: Page(*page) for stream, page in self._pages.items()}

    def entries(self, stream: Stream) -> list[LedgerEntry]:
        """Return the recorded prefix of a stream."""
        return [self._names[number] for number in self._entries.get(stream, ())]

    def _learn(self, entry: LedgerEntry) -> tuple[int, int]:
        digest = hashlib.blake2b(entry.signature.encode(), digest_size=8).digest()
        known = self._kinds[entry] = (len(self._names), int.from_bytes(digest) | 1)
        self._names.append(entry)
        return known


def find_unequal(by_rank: Sequence[Mapping[Stream, Page]]) -> list[Stream]:
    """Return the streams whose ranks differ in count or hash. Ranks that are not in `by_rank` are ignored."""
    streams = sorted({stream for pages in by_rank for stream in pages})
    return [
        stream
        for stream in streams
        if len({by_rank[rank].get(stream, Page(0, 0)) for rank in stream.ranks if rank < len(by_rank)}) > 1
    ]


def locate(
    stream: Stream, counts: Mapping[int, int], entries: Mapping[int, Sequence[LedgerEntry]]
) -> StreamMismatch:
    """Return the first collective in which the ranks of a stream differ, given the entries each rank kept."""
    longest = max(map(len, entries.values()), default=0)
    for position in range(longest):
        here = {rank: kept[position] if position < len(kept) else None for rank, kept in entries.items()}
        if len({entry.signature if entry is not None else None for entry in here.values()}) > 1:
            return StreamMismatch(stream, position + 1, here, counts)
    return StreamMismatch(stream, longest + 1, dict.fromkeys(entries), counts, is_known=False)
