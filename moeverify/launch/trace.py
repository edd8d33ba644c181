"""Every collective that this process issues, recorded below all of torch's ways to issue one.

torch.distributed's functions, functional collectives (DTensor), FSDP and the C++ reducer of DDP all end in an
operator of the `c10d` library, for every backend. The trace adds a kernel to these operators at the
BackendSelect key, which every call passes once (also under inference mode), and calls on from there.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import torch
import torch.distributed as dist

from moeverify.launch.flight import FlightFile

_TORCH = str(Path(torch.__file__).parent)
_BACKEND_SELECT = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)


class _Operator(NamedTuple):
    """What people call an operator, where its schema has this rank's tensors and a peer or root."""

    label: str
    tensors_at: int | None
    peer_at: int | None = None
    point_to_point: bool = False


_OPERATORS = {
    "allreduce_": _Operator("all_reduce", 0),
    "allreduce_coalesced_": _Operator("all_reduce_coalesced", 0),
    "allgather_": _Operator("all_gather", 1),
    "_allgather_base_": _Operator("all_gather_into_tensor", 1),
    "allgather_coalesced_": _Operator("all_gather_coalesced", 1),
    "allgather_into_tensor_coalesced_": _Operator("all_gather_into_tensor_coalesced", 1),
    "reduce_scatter_": _Operator("reduce_scatter", 1),
    "_reduce_scatter_base_": _Operator("reduce_scatter_tensor", 1),
    "reduce_scatter_tensor_coalesced_": _Operator("reduce_scatter_tensor_coalesced", 1),
    "alltoall_": _Operator("all_to_all", 1),
    "alltoall_base_": _Operator("all_to_all_single", 1),
    "broadcast_": _Operator("broadcast", 0, 2),
    "reduce_": _Operator("reduce", 0, 3),
    "gather_": _Operator("gather", 1, 3),
    "scatter_": _Operator("scatter", 0, 3),
    "barrier": _Operator("barrier", None),
    "monitored_barrier_": _Operator("monitored_barrier", None),
    "send": _Operator("send", 0, 2, point_to_point=True),
    "recv_": _Operator("recv", 0, 2, point_to_point=True),
    "recv_any_source_": _Operator("recv", 0, point_to_point=True),
}


class _Group(NamedTuple):
    name: str
    ranks: list[int]
    head: str  # `ranks` and `name` as JSON, made once


class _Entry:
    """One collective; `work` is held only until it is seen to be over, since it pins tensors."""

    __slots__ = (
        "dtype",
        "finished",
        "group",
        "number",
        "operator",
        "peer",
        "sequence",
        "shape",
        "site",
        "size",
        "started",
        "state",
        "work",
    )

    def __init__(self, operator: _Operator, group: _Group, tensors: Any, peer: int, site: str) -> None:
        flat = _flatten(tensors)
        self.operator = operator
        self.group = group
        self.peer = peer
        self.site = site
        self.size = len(flat)
        self.shape = tuple(flat[0].shape) if flat else ()
        self.dtype = str(flat[0].dtype)[6:] if flat else ""
        self.number = self.sequence = 0
        self.started = time.time()
        self.finished = 0.0
        self.state: Literal["started", "finished", "failed"] = "started"
        self.work: Any = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "op": self.operator.label,
            "group": self.group.ranks,
            "group_name": self.group.name,
            "sequence": self.sequence,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "num_tensors": self.size,
            "peer": self.peer,
            "site": self.site,
            "state": self.state,
            "started": self.started,
            "seconds": None if self.state == "started" else self.finished - self.started,
        }

    def to_flight(self) -> bytes:
        """Return the part that the flight file keeps, as JSON; by hand, since it is on every call's path."""
        return (
            f'{{"number": {self.number}, "op": "{self.operator.label}", {self.group.head}, '
            f'"sequence": {self.sequence}, "shape": {list(self.shape)}, "dtype": "{self.dtype}", '
            f'"num_tensors": {self.size}, "peer": {self.peer}, "site": {json.dumps(self.site)}}}'
        ).encode()


class CollectiveTrace:
    """A context manager that records collectives, the newest `capacity` of them.

    A record is a dict of JSON data: `number` (of all since the reset, from 1), `op`, `group` (global ranks),
    `group_name`, `sequence` (from 1, of this group; point-to-point counts apart, per peer), `shape` and
    `dtype` of this rank's first tensor, `num_tensors`, `peer` (root, source or destination in the group, or
    -1), `site` (the first frame outside torch), `state` (`started`, `finished`, `failed`), `started` (Unix
    time) and `seconds` until it was seen to be over.

    With a `path`, the last records are also kept in a file, for `flight.read_flight`.
    """

    def __init__(self, path: Path | None = None, capacity: int = 4096) -> None:
        self._entries: deque[_Entry] = deque(maxlen=capacity)
        self._open: list[_Entry] = []
        self._counts: dict[Any, int] = {}
        self._groups: dict[Any, _Group] = {}
        self._number = 0
        self._lock = threading.Lock()
        self._flight = FlightFile(path) if path is not None else None
        self._library: Any = None

    def __enter__(self) -> Self:
        """Begin to record. One trace records at a time in a process."""
        self._library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        for name, operator in _OPERATORS.items():
            kernel = self._make_kernel(operator, getattr(torch.ops.c10d, name).default.redispatch)
            self._library.impl(name, kernel, "BackendSelect", with_keyset=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        """End recording; what was recorded stays readable."""
        self._library._destroy()
        self._library = None
        self.poll()
        if self._flight is not None:
            self._flight.close()
            self._flight = None

    def reset(self) -> None:
        """Forget all records, and begin to count at 1 again."""
        with self._lock:
            self._entries.clear()
            self._open.clear()
            self._counts.clear()
            self._groups.clear()
            self._number = 0
            if self._flight is not None:
                self._flight.clear()

    def poll(self) -> None:
        """Look which collectives are over; cheap, and any thread may do it."""
        with self._lock:
            self._close_finished()

    def records(self) -> list[dict[str, Any]]:
        """Return the records, oldest first."""
        self.poll()
        return [entry.to_dict() for entry in list(self._entries)]

    def last(self) -> dict[str, Any] | None:
        """Return the newest record."""
        self.poll()
        return self._entries[-1].to_dict() if self._entries else None

    def _make_kernel(self, operator: _Operator, redispatch: Callable[..., Any]) -> Callable[..., Any]:
        _, tensors_at, peer_at, _ = operator

        def kernel(keys: Any, *arguments: Any, **named: Any) -> Any:
            tensors = arguments[tensors_at] if tensors_at is not None else ()
            peer = arguments[peer_at] if peer_at is not None else -1
            entry = self._begin(operator, _find_group(arguments), tensors, peer)
            try:
                returned = redispatch(keys - _BACKEND_SELECT, *arguments, **named)
            except BaseException:
                self._finish(entry, "failed")
                raise
            work = returned[-1] if isinstance(returned, tuple) else returned
            if work is None:
                self._finish(entry, "finished")
            else:
                entry.work = dist.Work.unbox(work)
            return returned

        return kernel

    def _begin(self, operator: _Operator, handle: dist.ProcessGroup, tensors: Any, peer: int) -> _Entry:
        group = self._groups.get(handle)
        if group is None:
            group = self._groups[handle] = _describe_group(handle)
        entry = _Entry(operator, group, tensors, peer, _find_site())
        key = (group.head, peer) if operator.point_to_point else group.head
        with self._lock:
            self._close_finished()
            self._counts[key] = entry.sequence = self._counts.get(key, 0) + 1
            self._number += 1
            entry.number = self._number
            self._entries.append(entry)
            self._open.append(entry)
            if self._flight is not None:
                self._flight.write(entry.number, entry.to_flight())
        return entry

    def _finish(self, entry: _Entry, state: Literal["finished", "failed"]) -> None:
        with self._lock:
            entry.state = state
            self._close_finished()

    def _close_finished(self) -> None:
        if not self._open:
            return
        still_open = []
        for entry in self._open:
            if entry.state == "started":
                if entry.work is None or not entry.work.is_completed():
                    still_open.append(entry)
                    continue
                entry.state = "finished" if entry.work.exception() is None else "failed"
            entry.finished = time.time()
            entry.work = None
            if self._flight is not None:
                self._flight.finish(entry.number, entry.state == "finished")
        self._open = still_open


def _flatten(tensors: Any) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [tensor for each in tensors for tensor in _flatten(each)]


def _find_group(arguments: tuple[Any, ...]) -> dist.ProcessGroup:
    """Return the group among the arguments; it is the first script object in every schema."""
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject):
            return dist.ProcessGroup.unbox(argument)
    raise AssertionError("a collective without a group")


def _describe_group(handle: dist.ProcessGroup) -> _Group:
    try:
        ranks = list(dist.get_process_group_ranks(handle))
    except (KeyError, ValueError, RuntimeError):  # A group that torch.distributed did not make.
        ranks = list(range(handle.size()))
    name = handle.group_name
    return _Group(name, ranks, f'"group": {ranks}, "group_name": {json.dumps(name)}')


def _find_site() -> str:
    """Return `file:line in function` of the first frame that is neither torch's nor this file's."""
    frame = sys._getframe(3)
    while True:
        code = frame.f_code
        name = code.co_filename
        if not name.startswith((_TORCH, "<")) and not name.endswith("contextlib.py"):
            return f"{name}:{frame.f_lineno} in {code.co_name}"
        if frame.f_back is None:
            return ""
        frame = frame.f_back
