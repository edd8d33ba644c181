"""The collectives of a trace, and the `c10d` operators that issue them."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from moeverify.results.trace import CollectiveRecord, State
from moeverify.verification.collectives.ledger import Stream


class CollectiveOperator(NamedTuple):
    """The common name of a `c10d` operator, and the positions of its tensors and of its peer or root.

    For a `lazy` operator, gloo does part of the work inside `Work.wait` and never reports completion. With
    `same_size`, all ranks must pass tensors of the same size, unless the call specifies splits.
    """

    label: str
    tensors_at: int | None
    peer_at: int | None = None
    point_to_point: bool = False
    lazy: bool = False
    same_size: bool = False
    splits_at: int | None = None


OPERATORS = {
    "allreduce_": CollectiveOperator("all_reduce", 0, same_size=True),
    "allreduce_coalesced_": CollectiveOperator("all_reduce_coalesced", 0, same_size=True),
    "allgather_": CollectiveOperator("all_gather", 1),
    "_allgather_base_": CollectiveOperator("all_gather_into_tensor", 1, same_size=True),
    "allgather_coalesced_": CollectiveOperator("all_gather_coalesced", 1),
    "allgather_into_tensor_coalesced_": CollectiveOperator(
        "all_gather_into_tensor_coalesced", 1, same_size=True
    ),
    "reduce_scatter_": CollectiveOperator("reduce_scatter", 1, lazy=True),
    "_reduce_scatter_base_": CollectiveOperator("reduce_scatter_tensor", 1, lazy=True, same_size=True),
    "reduce_scatter_tensor_coalesced_": CollectiveOperator(
        "reduce_scatter_tensor_coalesced", 1, lazy=True, same_size=True
    ),
    "alltoall_": CollectiveOperator("all_to_all", 1),
    "alltoall_base_": CollectiveOperator("all_to_all_single", 1, same_size=True, splits_at=3),
    "broadcast_": CollectiveOperator("broadcast", 0, 2, same_size=True),
    "reduce_": CollectiveOperator("reduce", 0, 3, same_size=True),
    "gather_": CollectiveOperator("gather", 1, 3),
    "scatter_": CollectiveOperator("scatter", 0, 3),
    "barrier": CollectiveOperator("barrier", None),
    "monitored_barrier_": CollectiveOperator("monitored_barrier", None),
    "send": CollectiveOperator("send", 0, 2, point_to_point=True),
    "recv_": CollectiveOperator("recv", 0, 2, point_to_point=True),
    "recv_any_source_": CollectiveOperator("recv", 0, point_to_point=True),
}


class GroupIdentity(NamedTuple):
    """A process group: name, global ranks, mesh axis, and all of these as JSON in `head`.

    `own` is the index of this rank in the group. The default group serves every axis that contains all
    ranks, and has an empty axis name.
    """

    name: str
    ranks: list[int]
    axis: str
    own: int
    head: str

    def stream(self, sender: int | None = None, receiver: int | None = None) -> Stream:
        """Return the stream of the group's collectives, or of the messages between two of its members."""
        if sender is None or receiver is None:
            return Stream(self.name, tuple(self.ranks), self.axis)
        pair = (self.ranks[sender], self.ranks[receiver])
        return Stream(self.name, pair, self.axis, is_message=True)


class Collective:
    """One collective. `work` is dropped when it has completed, since it keeps tensors alive."""

    __slots__ = (
        "device",
        "dtype",
        "finished",
        "group",
        "number",
        "operator",
        "outputs",
        "peer",
        "place",
        "sequence",
        "shape",
        "signature",
        "site",
        "size",
        "started",
        "state",
        "stream",
        "work",
        "work_id",
    )

    def __init__(
        self, operator: CollectiveOperator, group: GroupIdentity, arguments: tuple[Any, ...], site: str
    ) -> None:
        tensors = [] if operator.tensors_at is None else list(flatten(arguments[operator.tensors_at]))
        self.operator = operator
        self.group = group
        self.peer = arguments[operator.peer_at] if operator.peer_at is not None else -1
        self.site = site
        self.size = len(tensors)
        self.shape = tuple(tensors[0].shape) if tensors else ()
        self.device = tensors[0].device.type if tensors else "cpu"
        self.dtype = str(tensors[0].dtype)[6:] if tensors else ""
        self.signature = _sign(self, arguments)
        self.number = self.sequence = 0
        # the stream in which `place` is its number; the peers must issue the same
        self.stream: Stream | None = None
        self.place = 0
        self.started = time.time()
        self.finished = 0.0
        self.state: State = "started"
        self.work: Any = None
        self.work_id = 0
        self.outputs: tuple[int, ...] = ()
        if operator.lazy and self.device == "cpu":
            self.outputs = tuple(find_storage(tensor) for tensor in flatten(arguments[0]))

    def update(self) -> bool:
        """Poll the work and return whether the collective has ended."""
        if is_captured(self.device):
            return self.state != "started"  # a query of the device would become part of the captured graph
        if self.state == "started" and self.work is not None and is_over(self.work):
            # It may have failed: whoever waits for it gets the error. Querying it here makes torch print a
            # warning.
            self.state = "finished"
        return self.state != "started"

    def to_record(self) -> CollectiveRecord:
        """Return the record for a trace. It is not validated, because a run has thousands of records."""
        return CollectiveRecord.model_construct(
            number=self.number,
            op=self.operator.label,
            group=tuple(self.group.ranks),
            group_name=self.group.name,
            axis=self.group.axis,
            sequence=self.sequence,
            shape=self.shape,
            dtype=self.dtype,
            num_tensors=self.size,
            signature=self.signature,
            peer=self.peer,
            site=self.site,
            state=self.state,
            started=self.started,
            seconds=None if self.state == "started" else self.finished - self.started,
        )

    def to_flight(self) -> bytes:
        """Return the JSON record for the flight file, formatted by hand because every call pays for it."""
        return (
            f'{{"number": {self.number}, "op": "{self.operator.label}", {self.group.head}, '
            f'"sequence": {self.sequence}, "shape": {list(self.shape)}, "dtype": "{self.dtype}", '
            f'"num_tensors": {self.size}, "signature": "{self.signature}", "peer": {self.peer}, '
            f'"site": {json.dumps(self.site)}}}'
        ).encode()


def _sign(collective: Collective, arguments: tuple[Any, ...]) -> str:
    """Return a text of the properties that must agree on all ranks of a collective.

    Dimensions of size 1 are left out of the shape, since they do not change the data that is exchanged.
    """
    operator = collective.operator
    if operator.point_to_point:
        return f"message of {math.prod(collective.shape)} {collective.dtype}"
    words = operator.label
    if collective.size:
        words += f" on {collective.dtype}"
        is_split = operator.splits_at is not None and any(
            arguments[operator.splits_at : operator.splits_at + 2]
        )
        if operator.same_size and not is_split:
            words += str([size for size in collective.shape if size != 1])
            words += f" and {collective.size - 1} more" if collective.size > 1 else ""
    return words if operator.peer_at is None else f"{words}, root {collective.peer}"


class _StreamMark:
    """A point in the current CUDA stream, complete when the device has passed it, like a work."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def is_completed(self) -> bool:
        over: bool = self._event.query()  # type: ignore[no-untyped-call]
        return over


_is_completed = dist.Work.is_completed


def is_over(work: Any) -> bool:
    """Return whether a collective has ended. The query is not the program's, which may still have to wait."""
    return _is_completed(work) if isinstance(work, dist.Work) else work.is_completed()


def find_work(returned: Any) -> dist.Work | None:
    """Return the work in the return value of an operator, or None. Synchronous NCCL calls have none."""
    work = returned[-1] if isinstance(returned, tuple | list) else returned
    return dist.Work.unbox(work) if isinstance(work, torch.ScriptObject) else None


def is_captured(device: str) -> bool:
    """Return whether calls for this device are being captured into a CUDA graph."""
    return device == "cuda" and torch.cuda.is_current_stream_capturing()


def mark_stream(device: str) -> _StreamMark | None:
    """Return a completion query for a collective without a work, or None if the device has none."""
    return _StreamMark() if device == "cuda" else None


def flatten(tensors: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a tensor, a list, or a list of lists."""
    if isinstance(tensors, torch.Tensor):
        yield tensors
    else:
        for each in tensors:
            yield from flatten(each)


def find_storage(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage, or 0 for a tensor without one, such as a fake tensor."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def find_group(arguments: tuple[Any, ...]) -> dist.ProcessGroup:
    """Return the group in an operator's arguments: in every schema it is the first script object."""
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject):
            return dist.ProcessGroup.unbox(argument)
    raise AssertionError("a collective without a group")


def describe_group(handle: dist.ProcessGroup) -> GroupIdentity:
    """Return a description of a group. Ranks of a group not made by torch.distributed count from 0."""
    try:
        ranks = list(dist.get_process_group_ranks(handle))
    except (KeyError, ValueError, RuntimeError):
        ranks = list(range(handle.size()))
    name, made_for = handle.group_name, handle.group_desc
    axis = made_for.removeprefix("mesh_") if made_for.startswith("mesh_") else ""
    head = f'"group": {ranks}, "group_name": {json.dumps(name)}, "axis": {json.dumps(axis)}'
    return GroupIdentity(name, ranks, axis, handle.rank(), head)
