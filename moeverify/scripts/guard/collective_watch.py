"""The collectives that this rank issues from one optimizer step to the next, and the sums of forward passes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from moeverify.parallel.regions.passes import is_in_backward
from moeverify.scripts.guard.groups import describe_groups
from moeverify.scripts.guard.lines import GroupLine, SumLine
from moeverify.scripts.guard.samples import count_positions, is_varied, measure_samples, pick
from moeverify.verification.collectives.interception import Collective, flatten
from moeverify.verification.collectives.trace import CollectiveTrace

_FEWEST_ELEMENTS = 64  # of an operand: equal losses or counts are no evidence
_MOST_SUMS = 64
_SMALL = 16  # elements: a loss or a count
_NO_EXCHANGE = ("broadcast", "barrier", "monitored_barrier")  # DDP broadcasts buffers in forward passes


def _accept_all() -> bool:
    return True


class CollectiveWatch:
    """A trace from one optimizer step to the next. `on_issue` is called before each collective.

    A pipeline stage receives before it calls its model, so a trace that begins with the forward pass would
    miss messages. `trace` records all the time, if given; otherwise records are made between `begin` and `stop`.
    """

    def __init__(
        self, on_issue: Callable[[Collective, Any, Any], None], trace: CollectiveTrace | None = None
    ) -> None:
        self.groups: tuple[GroupLine, ...] = ()
        self.exchanged: set[tuple[int, ...]] = set()
        self.takes_any = False
        self.is_complete = True
        self._is_on = False
        self._thread = threading.get_ident()
        self._before: dict[object, int] | None = None
        self._sums: list[tuple[SumLine, Tensor]] = []  # without the hash, and a sample of the operand
        self._trace = trace or CollectiveTrace()
        self._owns_trace = trace is None
        self._since = 0
        self._on_issue = on_issue

    def begin(self) -> None:
        """Begin with the first collective of the next step, and drop all records."""
        if not dist.is_available():
            return
        if self._owns_trace:
            self._trace.reset()
        self._since = self._trace.restart_ledger()
        self._before, self._sums = None, []
        self.groups, self.exchanged, self.takes_any, self.is_complete = (), set(), False, True
        if not self._is_on:
            self._trace.on_issue, self._trace.accepts = self._on_issue, self._is_in_order
            if self._owns_trace:
                self._trace.__enter__()
            self._is_on = True

    def note_thread(self) -> None:
        """Remember the thread of the training loop: collectives of others have no order relative to steps."""
        self._thread = threading.get_ident()

    def note_backward(self) -> None:
        """Remember the number of collectives before the first backward pass."""
        if self._is_on and self._before is None:
            self._before = {stream: page.number for stream, page in self._trace.ledger.pages().items()}

    def end(self) -> None:
        """Stop, and describe the collectives.

        An optimizer that steps within a backward pass cuts the messages of a pipeline apart.
        """
        if not self._is_on:
            return
        self.stop()
        self.is_complete = not is_in_backward()
        self.takes_any = any(
            record.op == "recv" and record.peer < 0 for record in self._trace.since(self._since)
        )
        self.groups = describe_groups(self._trace, self._since, self._before or {})

    def stop(self) -> None:
        """Stop without a description."""
        if self._is_on:
            self._is_on = False
            self._trace.on_issue, self._trace.accepts = None, _accept_all
            if self._owns_trace:
                self._trace.__exit__(None, None, None)

    def take_sums(self) -> tuple[SumLine, ...]:
        """Return the reductions of the forward passes; synchronizes with the device."""
        sums, self._sums = self._sums, []
        samples = [sample for _, sample in sums]
        hashes = zip(measure_samples(samples, only_hashes=True).hashes, is_varied(samples), strict=True)
        return tuple(
            line.model_copy(update={"hash": bits if is_one else 0})
            for (line, _), (bits, is_one) in zip(sums, hashes, strict=True)
        )

    def see(self, collective: Collective, operands: Any, *, is_in_model: bool) -> None:
        """Note the exchange of a forward pass, and keep a sample of the operand if it is a sum.

        A script may compute without modules: before the first backward pass, numbers with fractions count too.
        """
        ranks = tuple(collective.group.ranks)
        operator = collective.operator.label
        if len(ranks) < 2 or is_in_backward() or operator in _NO_EXCHANGE:
            return
        tensors = list(flatten(operands)) if operands is not None else []
        numel = sum(each.numel() for each in tensors)
        is_early = self._before is None and any(each.is_floating_point() for each in tensors)
        if numel <= _SMALL or not (is_in_model or is_early):
            return
        self.exchanged.add(ranks)
        if (
            is_in_model
            and operator == "all_reduce"
            and len(tensors) == 1
            and tensors[0].is_floating_point()
            and numel >= _FEWEST_ELEMENTS
            and len(self._sums) < _MOST_SUMS
        ):
            positions, _ = count_positions(tensors[0])
            line = SumLine(ranks=ranks, site=collective.site, hash=0, num_positions=positions)
            self._sums.append((line, pick(tensors[0]).clone()))

    def _is_in_order(self) -> bool:
        if threading.get_ident() == self._thread:
            return True
        # Autograd's threads are not Python's; they belong to the backward pass of the loop.
        return isinstance(threading.current_thread(), threading._DummyThread)
