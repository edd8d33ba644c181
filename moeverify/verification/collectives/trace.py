"""Trace of every collective that this process issues, recorded below all torch APIs that issue one.

The functions of torch.distributed, functional collectives (DTensor), FSDP and the C++ reducer of DDP all
call an operator of the `c10d` library, for every backend. The trace registers a kernel for these operators
at the BackendSelect key, which each call passes exactly once (also in inference mode), and redispatches
from there.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from moeverify.results.trace import CollectiveRecord, State
from moeverify.train.calls.listener import DECORATORS
from moeverify.verification.collectives.flight_recorder import NUM_SLOTS, FlightFile
from moeverify.verification.collectives.interception import (
    OPERATORS,
    Collective,
    CollectiveOperator,
    GroupIdentity,
    describe_group,
    find_group,
    find_storage,
    find_work,
    is_captured,
    mark_stream,
)
from moeverify.verification.collectives.ledger import Ledger, Stream

# Functions of `train.calls` wrap torch functions in watched scripts.
_CALLS = str(Path(__file__).parents[2] / "train" / "calls")
_INNER = (str(Path(torch.__file__).parent), __file__, _CALLS, "<")
# Methods of torch function and dispatch modes. Their frames are also between a call and its caller.
_MODES = ("__torch_function__", "__torch_dispatch__")
_CAPACITY = 4096
_BACKEND_SELECT = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)


class CollectiveTrace:
    """Context manager that records the newest 4096 collectives of this process.

    `ledger` has the count and a hash of all collectives of each group, for comparison between ranks.
    `on_group` is called before the first collective of each group, and `on_issue` before each collective with
    the collective, the issuing frame and the operands. `accepts` says whether a collective that the current
    thread issues has a place in the ledger, and is shown to `on_issue`.
    With a `path`, the last records are also written to a file that `flight_recorder.read_flight` reads.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._collectives: deque[Collective] = deque(maxlen=_CAPACITY)
        self._open: deque[Collective] = deque(maxlen=_CAPACITY)
        self._counts: dict[Any, int] = {}
        self._groups: dict[Any, GroupIdentity] = {}
        self._streams: dict[str, Stream] = {}
        self._number = 0
        self.ledger = Ledger()
        self._lock = threading.Lock()
        self._flight = FlightFile(path) if path is not None else None
        self._libraries: list[Any] = []
        self.on_group: Callable[[], None] = lambda: None
        self.on_issue: Callable[[Collective, FrameType | None, Any], None] | None = None
        self.accepts: Callable[[], bool] = lambda: True
        self._wait: Any = None

    def __enter__(self) -> Self:
        """Start recording. Only one trace per process can record at a time."""
        library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        for name, operator in OPERATORS.items():
            kernel = self._make_kernel(operator, getattr(torch.ops.c10d, name).default.redispatch)
            library.impl(name, kernel, "BackendSelect", with_keyset=True)  # type: ignore[no-untyped-call]
        functional = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]
        kernel = self._make_wait_kernel(torch.ops._c10d_functional.wait_tensor.default.redispatch)
        functional.impl("wait_tensor", kernel, "BackendSelect", with_keyset=True)  # type: ignore[no-untyped-call]
        self._libraries = [library, functional]
        self._wait = dist.Work.wait
        dist.Work.wait = self._make_wait(self._wait)  # type: ignore[method-assign]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        """Stop recording. The records remain readable."""
        dist.Work.wait = self._wait  # type: ignore[method-assign]
        for library in self._libraries:
            library._destroy()
        self._libraries = []
        with self._lock:
            self._close_finished()
            self._open.clear()
            if self._flight is not None:
                self._flight.close()
                self._flight = None

    @property
    def num_collectives(self) -> int:
        """Return the number of collectives that this process has issued since the last reset."""
        return self._number

    def reset(self) -> None:
        """Remove all records, and restart numbering at 1."""
        with self._lock:
            self._collectives.clear()
            self._open.clear()
            self._counts.clear()
            self._groups.clear()
            self._streams.clear()
            self.ledger.clear()
            self._number = 0
            if self._flight is not None:
                self._flight.clear()

    def keep(self, path: Path) -> None:
        """Also write the last records to a new file from now on."""
        path.unlink(missing_ok=True)  # another process may still write to a file of this name
        with self._lock:
            self._flight = FlightFile(path)

    def restart_ledger(self) -> int:
        """Clear the ledger only, and return the number of the last collective."""
        with self._lock:
            self.ledger.clear()
            return self._number

    def seal(self) -> None:
        """Stop writing to the file, regardless of the outcome of pending collectives."""
        with self._lock:
            self._flight = None

    def poll(self, device: str | None = None) -> None:
        """Update the state of pending collectives, of all devices or of one. Cheap and thread-safe."""
        with self._lock:
            self._close_finished(device)

    def records(self) -> list[CollectiveRecord]:
        """Return the records, oldest first."""
        self.poll()
        return [collective.to_record() for collective in list(self._collectives)]

    def since(self, number: int) -> list[CollectiveRecord]:
        """Return the records of the collectives after `number`, oldest first."""
        if self._number == number:
            return []  # a frequent case
        return [
            collective.to_record() for collective in list(self._collectives) if collective.number > number
        ]

    def last(self) -> CollectiveRecord | None:
        """Return the newest record, or None."""
        self.poll()
        return self._collectives[-1].to_record() if self._collectives else None

    def _make_kernel(
        self, operator: CollectiveOperator, redispatch: Callable[..., Any]
    ) -> Callable[..., Any]:
        def kernel(keys: Any, *arguments: Any, **named: Any) -> Any:
            is_accepted = self.accepts()
            collective = self._begin(operator, find_group(arguments), arguments, is_noted=is_accepted)
            if self.on_issue is not None and is_accepted:
                self.on_issue(collective, find_call(), arguments[0])
            try:
                returned = redispatch(keys - _BACKEND_SELECT, *arguments, **named)
            except BaseException:
                self._finish(collective, "failed")
                raise
            captured = is_captured(collective.device)
            work = None if captured else find_work(returned) or mark_stream(collective.device)
            if work is None:
                self._finish(collective, "finished")
            else:
                collective.work = work
                collective.work_id = id(work)
            return returned

        return kernel

    def _make_wait_kernel(self, redispatch: Callable[..., Any]) -> Callable[..., Any]:
        def kernel(keys: Any, tensor: torch.Tensor) -> Any:
            try:
                returned = redispatch(keys - _BACKEND_SELECT, tensor)
            except BaseException:
                self._mark_failed(0)
                raise
            with self._lock:
                lazy = any(collective.outputs for collective in self._open)
            if lazy:
                storage = find_storage(tensor)
                self._finish_waited(lambda collective: storage in collective.outputs)
            return returned

        return kernel

    def _make_wait(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def wait_and_note(work: dist.Work, *arguments: Any, **named: Any) -> Any:
            try:
                returned = wait(work, *arguments, **named)
            except BaseException:
                self._mark_failed(id(work))
                raise
            # On a GPU, `wait` only makes the current stream wait.
            self._finish_waited(lambda collective: collective.work is work and collective.device == "cpu")
            return returned

        return wait_and_note

    def _begin(
        self,
        operator: CollectiveOperator,
        handle: dist.ProcessGroup,
        arguments: tuple[Any, ...],
        *,
        is_noted: bool,
    ) -> Collective:
        group = self._groups.get(handle)
        if group is None:
            self.on_group()
            group = self._groups[handle] = describe_group(handle)
        collective = Collective(operator, group, arguments, find_site())
        key = (group.head, collective.peer) if operator.point_to_point else group.head
        with self._lock:
            # Check only a prefix: on CUDA hundreds may be pending.
            while self._open and self._open[0].update():
                self._close(self._open.popleft())
            self._counts[key] = collective.sequence = self._counts.get(key, 0) + 1
            self._number += 1
            collective.number = self._number
            if is_noted:
                self._note(collective)
            self._collectives.append(collective)
            self._open.append(collective)
            if self._flight is not None:
                self._flight.write(collective.number, collective.to_flight())
        return collective

    def _note(self, collective: Collective) -> None:
        """Record in the ledger the properties that must agree on the peers."""
        group, operator, peer = collective.group, collective.operator, collective.peer
        if len(group.ranks) == 1:
            return
        if not operator.point_to_point:
            stream = self._streams.get(group.head)
            if stream is None:
                stream = self._streams[group.head] = group.stream()
        elif operator.peer_at is None:
            return  # any sender matches, so no order has to agree
        else:
            pair = (group.own, peer) if operator.label == "send" else (peer, group.own)
            stream = group.stream(*pair)
        collective.stream = stream
        collective.place = self.ledger.note(stream, collective.signature, collective.site)

    def _finish(self, collective: Collective, state: State) -> None:
        with self._lock:
            collective.state = state
            self._close_finished()

    def _finish_waited(self, matches: Callable[[Collective], bool]) -> None:
        """Mark the collectives that were waited for as finished: the process may stop before the next poll."""
        with self._lock:
            waited_for = [each for each in self._open if matches(each)]
            for collective in waited_for:
                collective.state = "finished"
            if waited_for:
                self._close_finished()

    def _mark_failed(self, work_id: int) -> None:
        """Mark the collective of a failed work. If the id is unknown, mark the oldest pending collective."""
        with self._lock:
            recent = list(self._collectives)[-NUM_SLOTS:]
            known = (
                [each for each in recent if each.work_id == work_id] or list(self._open)[:1] or recent[-1:]
            )
            for collective in known[-1:]:
                collective.state = "failed"
                if self._flight is not None:
                    self._flight.finish(collective.number, success=False)
            self._close_finished()

    def _close_finished(self, device: str | None = None) -> None:
        collectives = list(self._open)
        self._open.clear()
        for collective in collectives:
            if device in (None, collective.device) and collective.update():
                self._close(collective)
            else:
                self._open.append(collective)

    def _close(self, collective: Collective) -> None:
        collective.finished = time.time()
        collective.work = None
        if self._flight is not None:
            self._flight.finish(collective.number, collective.state == "finished")


def find_site(*also: str) -> str:
    """Return `file:line in function` of the call that issues a collective, or an empty string.

    `also` holds more files whose frames are skipped.
    """
    frame = find_call(also)
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def find_call(also: tuple[str, ...] = ()) -> FrameType | None:
    """Return the innermost frame outside torch, or None.

    On CUDA the backward pass runs in its own thread, which has only frames of this trace.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        name = code.co_filename
        if not (name.startswith((*_INNER, *also)) or name.endswith(DECORATORS) or code.co_name in _MODES):
            return frame
        frame = frame.f_back
    return None
