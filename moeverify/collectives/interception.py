"""One collective of a trace, and torch's operators that issue them."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from moeverify.collectives.ledger import Stream
from moeverify.results.trace import CollectiveRecord, State


class Operator(NamedTuple):
    """What people call an operator of `c10d`, and which arguments hold this rank's tensors and a peer or root.

    gloo does a part of a `lazy` operator's work inside `Work.wait`, and never says that it is complete. With
    `same_size` all ranks must bring tensors of one size, unless the call itself says how they are split.
    """

    label: str
    tensors_at: int | None
    peer_at: int | None = None
    point_to_point: bool = False
    lazy: bool = False
    same_size: bool = False
    splits_at: int | None = None


OPERATORS = {
    "allreduce_": Operator("all_reduce", 0, same_size=True),
    "allreduce_coalesced_": Operator("all_reduce_coalesced", 0, same_size=True),
    "allgather_": Operator("all_gather", 1),
    "_allgather_base_": Operator("all_gather_into_tensor", 1, same_size=True),
    "allgather_coalesced_": Operator("all_gather_coalesced", 1),
    "allgather_into_tensor_coalesced_": Operator("all_gather_into_tensor_coalesced", 1, same_size=True),
    "reduce_scatter_": Operator("reduce_scatter", 1, lazy=True),
    "_reduce_scatter_base_": Operator("reduce_scatter_tensor", 1, lazy=True, same_size=True),
    "reduce_scatter_tensor_coalesced_": Operator(
        "reduce_scatter_tensor_coalesced", 1, lazy=True, same_size=True
    ),
    "alltoall_": Operator("all_to_all", 1),
    "alltoall_base_": Operator("all_to_all_single", 1, same_size=True, splits_at=3),
    "broadcast_": Operator("broadcast", 0, 2, same_size=True),
    "reduce_": Operator("reduce", 0, 3, same_size=True),
    "gather_": Operator("gather", 1, 3),
    "scatter_": Operator("scatter", 0, 3),
    "barrier": Operator("barrier", None),
    "monitored_barrier_": Operator("monitored_barrier", None),
    "send": Operator("send", 0, 2, point_to_point=True),
    "recv_": Operator("recv", 0, 2, point_to_point=True),
    "recv_any_source_": Operator("recv", 0, point_to_point=True),
}


class Group(NamedTuple):
    """A process group: its name, its global ranks, the mesh axis that it was made for, and all as JSON.

    `own` is this rank's place in it. The default group serves every axis that has all ranks, and names none.
    """

    name: str
    ranks: list[int]
    axis: str
    own: int
    head: str

    def stream(self, sender: int | None = None, receiver: int | None = None) -> Stream:
        """Return the stream of the group's collectives, or of the messages between two places in it."""
        if sender is None or receiver is None:
            return Stream(self.name, tuple(self.ranks), self.axis)
        pair = (self.ranks[sender], self.ranks[receiver])
        return Stream(self.name, pair, self.axis, is_message=True)


class Collective:
    """One collective; `work` is kept only until it is seen to be over, since it pins tensors."""

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

    def __init__(self, operator: Operator, group: Group, arguments: tuple[Any, ...], site: str) -> None:
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
        self.stream: Stream | None = None  # in which it is number `place`: what the peers must issue too
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
        """Return whether it is over, after a look at its work."""
        if is_captured(self.device):
            return self.state != "started"  # to ask the device would be a part of what a graph repeats
        if self.state == "started" and self.work is not None and self.work.is_completed():
            # Perhaps with an error: whoever waits for it gets it. Asking here makes torch print a warning.
            self.state = "finished"
        return self.state != "started"

    def to_record(self) -> CollectiveRecord:
        """Return the record that a trace shows; not validated, since a run has thousands."""
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
        """Return what the flight file keeps, as JSON; put together by hand, since every call pays for it."""
        return (
            f'{{"number": {self.number}, "op": "{self.operator.label}", {self.group.head}, '
            f'"sequence": {self.sequence}, "shape": {list(self.shape)}, "dtype": "{self.dtype}", '
            f'"num_tensors": {self.size}, "signature": "{self.signature}", "peer": {self.peer}, '
            f'"site": {json.dumps(self.site)}}}'
        ).encode()


def _sign(collective: Collective, arguments: tuple[Any, ...]) -> str:
    """Return what must be the same on all ranks that meet in a collective, in words.

    Sizes of 1 are left out of a shape: they do not change what is exchanged.
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
    """A point in the current CUDA stream; complete, like a work, when the device has passed it."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def is_completed(self) -> bool:
        over: bool = self._event.query()  # type: ignore[no-untyped-call]
        return over


def find_work(returned: Any) -> dist.Work | None:
    """Return the work among what an operator returned; NCCL's synchronous calls have none."""
    work = returned[-1] if isinstance(returned, tuple | list) else returned
    return dist.Work.unbox(work) if isinstance(work, torch.ScriptObject) else None


def is_captured(device: str) -> bool:
    """Return whether what is issued now for a device becomes a part of a CUDA graph, and begins when that does."""
    return device == "cuda" and torch.cuda.is_current_stream_capturing()


def mark_stream(device: str) -> _StreamMark | None:
    """Return something to ask whether a collective without a work is over, where the device can say."""
    return _StreamMark() if device == "cuda" else None


def flatten(tensors: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a tensor, a list, or a list of lists."""
    if isinstance(tensors, torch.Tensor):
        yield tensors
    else:
        for each in tensors:
            yield from flatten(each)


def find_storage(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 for one that has none, such as a fake tensor."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def find_group(arguments: tuple[Any, ...]) -> dist.ProcessGroup:
    """Return the group among an operator's arguments: in every schema it is the first script object."""
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject):
            return dist.ProcessGroup.unbox(argument)
    raise AssertionError("a collective without a group")


def describe_group(handle: dist.ProcessGroup) -> Group:
    """Return a group's name and ranks; counted from 0 for a group that torch.distributed did not make."""
    try:
        ranks = list(dist.get_process_group_ranks(handle))
    except (KeyError, ValueError, RuntimeError):
        ranks = list(range(handle.size()))
    name, made_for = handle.group_name, handle.group_desc
    axis = made_for.removeprefix("mesh_") if made_for.startswith("mesh_") else ""
    head = f'"group": {ranks}, "group_name": {json.dumps(name)}, "axis": {json.dumps(axis)}'
    return Group(name, ranks, axis, handle.rank(), head)
