"""The stop of a rank before a collective that its group issues differently, driven by simulated traces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moeverify.results.facts import CollectiveFacts, Issue
from moeverify.verification.collectives.ledger import Stream
from moeverify.verification.collectives.trace import CollectiveTrace
from moeverify.verification.jobs import DifferingCollective
from moeverify.verification.worker.differing_collective import DifferingStop

TP, OTHER_TP, WORLD = Stream("7", (0, 1), "tp"), Stream("8", (2, 3), "tp"), Stream("0", (0, 1, 2, 3))
ISSUES = (Issue(ranks=(0,), signature="b"), Issue(ranks=(1,), signature=None))


@dataclass
class Rank:
    """One watching rank; `stops` are (reason, names at the prompt)."""

    stopper: DifferingStop
    trace: CollectiveTrace
    stops: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    counts: dict[Stream, int] = field(default_factory=dict)

    def issue(self, *streams: Stream) -> int:
        """Issue collectives, and return the number of the rank's stops so far."""
        for stream in streams:
            self.counts[stream] = self.counts.get(stream, 0) + 1
            collective: Any = SimpleNamespace(stream=stream, place=self.counts[stream], signature="b")
            assert self.trace.on_issue is not None
            self.trace.on_issue(collective, None, [torch.ones(2)])
        return len(self.stops)


@pytest.fixture
def store() -> Iterator[None]:
    """Set up a job of one rank, whose store the ranks of a test share."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def make_rank(own: int, stream: Stream = TP, **rest: Any) -> Rank:
    fields = {"counts": {0: 3, 1: 2}, "issues": ISSUES, "number": 3}
    facts = CollectiveFacts(
        axis=stream.axis,
        ranks=stream.ranks,
        group=stream.group,
        is_message=stream.is_message,
        **fields | rest,
    )

    def stop(about: str, frame: FrameType | None, values: Any) -> None:
        rank.stops.append((about, dict(values)))

    trace = CollectiveTrace()
    stopper = DifferingStop(DifferingCollective(about="it", facts=facts), own, trace, stop)
    rank = Rank(stopper, trace)
    return rank


@pytest.mark.usefixtures("store")
def test_a_rank_stops_once_before_the_collective_that_differs() -> None:
    rank = make_rank(0)
    with rank.stopper.watching():
        assert rank.issue(TP, WORLD, TP, WORLD, OTHER_TP, OTHER_TP, OTHER_TP) == 0
        assert rank.issue(TP) == 1
        assert rank.issue(TP, TP, WORLD) == 1
    assert rank.trace.on_issue is None
    ((about, names),) = rank.stops
    assert (about, names["issued"], names["peers"]) == ("it", "b", {0: "b", 1: None})
    assert torch.equal(names["operands"][0], torch.ones(2))


@pytest.mark.usefixtures("store")
def test_a_rank_that_issues_no_further_one_stops_when_others_have() -> None:
    short, full = make_rank(1), make_rank(0)
    with short.stopper.watching(), full.stopper.watching():
        assert short.issue(TP, TP, WORLD) == 0  # it may yet have to meet the others there
        assert full.issue(TP, TP, TP) == 1
        assert short.issue(WORLD) == 1
    assert short.stops[0][0] == "it: this rank issues no further one, and comes to this one instead"


@pytest.mark.usefixtures("store")
def test_it_stops_at_the_end_where_nothing_else_is_issued() -> None:
    short = make_rank(1)
    with short.stopper.watching():
        assert short.issue(TP, TP, WORLD) == 0
    assert [about for about, _ in short.stops] == ["it: this rank has issued no further one"]
    full = make_rank(0)
    with full.stopper.watching():
        assert full.issue(TP, WORLD) == 0
    assert full.stops == []


@pytest.mark.usefixtures("store")
def test_one_that_has_not_come_so_far_goes_on_though_others_have_stopped() -> None:
    short, full = make_rank(1), make_rank(0)
    with short.stopper.watching(), full.stopper.watching():
        assert full.issue(TP, TP, TP) == 1
        assert short.issue(TP, WORLD) == 0
        assert short.issue(TP) == 0
        assert short.issue(WORLD) == 1


@pytest.mark.usefixtures("store")
def test_another_group_of_the_axis_stops_at_the_same_number_and_other_axes_do_not() -> None:
    rank = make_rank(2)
    with rank.stopper.watching():
        assert rank.issue(WORLD, WORLD, WORLD, OTHER_TP, OTHER_TP) == 0
        assert rank.issue(OTHER_TP) == 1
    unnamed = make_rank(2, Stream("9", (0, 1)))
    with unnamed.stopper.watching():
        assert unnamed.issue(Stream("10", (2, 3)), Stream("10", (2, 3)), Stream("10", (2, 3))) == 0


@pytest.mark.usefixtures("store")
def test_messages_of_one_pair_are_no_collectives_of_its_group() -> None:
    message = TP._replace(is_message=True)
    rank = make_rank(0, message, number=1, counts={0: 1, 1: 0})
    with rank.stopper.watching():
        assert rank.issue(TP, TP) == 0
        assert rank.issue(message) == 1
    bystander = make_rank(2, message, number=1, counts={0: 1, 1: 0})
    with bystander.stopper.watching():
        assert bystander.issue(OTHER_TP) == 0
