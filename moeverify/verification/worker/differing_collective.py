"""Debugger stop before the first collective that differs between the ranks of a group. Runs on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch.distributed as dist

from moeverify.results.facts import CollectiveFacts
from moeverify.verification.collectives.interception import Collective, flatten
from moeverify.verification.collectives.ledger import Stream
from moeverify.verification.collectives.trace import CollectiveTrace
from moeverify.verification.jobs import DifferingCollective
from moeverify.verification.worker.blamed_place import Stop

_KEY = "debug: a rank has stopped before the collective that differs"


class DifferingStop:
    """Stops this rank once, before it issues the collective that differs between ranks.

    A rank that issues no more collectives in the group stops at its next collective of any kind, once
    others have stopped. If there is none, it stops at the end of training. A rank of another group of the
    same axis stops at the collective with the same number, for comparison.
    """

    def __init__(self, at: DifferingCollective, rank: int, trace: CollectiveTrace, stop: Stop) -> None:
        self._at = at
        self._facts = at.facts
        self._trace = trace
        self._stop_rank = stop
        self._is_member = rank in at.facts.ranks
        self._last = at.facts.counts.get(rank, at.facts.number)  # collectives of this rank in the group
        self._num_issued = 0
        self.has_stopped = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Stop this rank during the block, or at its end."""
        self._trace.on_issue = self._look
        try:
            yield
            if self._is_over and not self.has_stopped:
                self._stop(None, f"{self._at.about}: this rank has issued no further one")
        finally:
            self._trace.on_issue = None

    @property
    def _is_over(self) -> bool:
        """Return whether this rank has issued its last collective of the group while other ranks issue more."""
        return self._is_member and self._num_issued >= self._last < self._facts.number

    def _look(self, collective: Collective, frame: FrameType | None, operands: Any) -> None:
        if self.has_stopped:
            return
        own = collective.stream is not None and is_alike(collective.stream, self._facts, self._is_member)
        if not own and self._is_over and dist.distributed_c10d._get_default_store().check([_KEY]):
            about = f"{self._at.about}: this rank issues no further one, and comes to this one instead"
        elif own and collective.place == self._facts.number:
            about = self._at.about
            dist.distributed_c10d._get_default_store().set(_KEY, "1")
        else:
            self._num_issued += own
            return
        brought = [tensor.detach() for tensor in flatten(operands)]
        self._stop(frame, about, issued=collective.signature, operands=brought)

    def _stop(self, frame: FrameType | None, about: str, **values: object) -> None:
        self.has_stopped = True
        names: Mapping[str, object] = {**values, "peers": dict(self._list_peers())}
        self._stop_rank(about, frame, names)

    def _list_peers(self) -> Iterator[tuple[int, str | None]]:
        """Yield (rank, signature) of the group's collective with this number; None if not issued."""
        for issue in self._facts.issues:
            for rank in issue.ranks:
                yield rank, issue.signature


def is_alike(stream: Stream, facts: CollectiveFacts, is_member: bool) -> bool:
    """Return whether to stop in a stream.

    A member of the differing group stops in the group's own stream. Other ranks stop in a stream of the
    same axis.
    """
    if is_member:
        found = (stream.group, stream.ranks, stream.is_message)
        return found == (facts.group, facts.ranks, facts.is_message)
    return bool(stream.axis) and stream.axis == facts.axis and not (stream.is_message or facts.is_message)
