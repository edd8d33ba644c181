"""Records every operator of a step, with its inputs, its results and the line that called it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from moeverify.explain.fused import list_decompositions, plain_attention
from moeverify.explain.meetings import Call, read_filling, read_returning
from moeverify.explain.operators import NotExecutable, execute
from moeverify.explain.program import (
    LEAF,
    READ,
    SETUP,
    UNSEEN,
    End,
    Geometry,
    Meeting,
    Op,
    Program,
    Race,
    Ref,
    Shown,
    Value,
)
from moeverify.explain.sites import find_sites, is_direct
from moeverify.layout.local_shard import logical_name
from moeverify.layout.placement import local_part
from moeverify.layout.region import Region

MOST_ELEMENTS = 1 << 28
"""Elements that are kept of the values of a step: 2 GiB in float64."""

_NO_OPERATORS = torch._C._disabled_torch_dispatch_impl
_SAME = frozenset({"detach", "alias", "lift_fresh", "wait_tensor", "_wrap_tensor_autograd"})
"""Operators whose result is the very tensor that they take."""

_NO_NODE = 1 << 63
"""Sequence numbers of autograd from here on belong to no operator: gradients are accumulated."""


@dataclass
class _Use:
    """A collective that may still be using memory."""

    op: int
    writes: bool
    work: Any
    is_direct: bool


@dataclass
class _Memory:
    """What is known of one storage: which value lies where, and the writes that are not covered by later ones."""

    storage: StorageWeakRef
    epoch: int = 0
    entries: dict[tuple[Geometry, torch.dtype], tuple[int, int]] = field(default_factory=dict)
    writes: list[tuple[int, Geometry]] = field(default_factory=list)
    uses: list[_Use] = field(default_factory=list)


@dataclass
class _Pending:
    """Results of a collective that are in memory only when it is waited for."""

    values: list[int]
    tensors: list[Tensor]
    use: _Use


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """Records into `program` what this process computes while `recording` is entered.

    Tensors are known by their memory, so that a detached tensor, one that autograd has saved and a gathered parameter
    are the values that they are. Values are compared with the memory at each use: a change that no operator made is
    recorded as `UNSEEN`. Subclasses of tensors are seen as the plain tensors that they hold.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return that compiled code stays compiled: it is one operator."""
        return True

    def __init__(self, names: Mapping[int, str] | None = None, limit: int = MOST_ELEMENTS) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.program = Program()
        self._names = dict(names or {})
        self._room = limit
        self._is_open = False
        self._memories: dict[int, _Memory] = {}
        self._pending: list[_Pending] = []
        self._origins: dict[int, int] = {}
        self._modules: list[str] = []
        self._fqns: dict[int, str] = {}
        self._calls: dict[tuple[int, str], int] = {}
        self._is_step = 0
        self._step = SETUP
        self._sequences: dict[tuple[Any, ...], int] = {}

    def name_tensors(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Give tensors that exist already the labels that their values will have."""
        for name, tensor in named:
            with _disable_current_modes():
                local = local_part(tensor.detach())
                self._names[_storage_of(local)] = name
                if _has_memory(local) and local.numel():
                    self.program.values[self._find(local)].label = name

    def name_modules(self, model: nn.Module) -> None:
        """Know modules by their names."""
        self._fqns |= {id(module): logical_name(name) for name, module in model.named_modules()}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record while the block runs."""
        handles = [
            nn.modules.module.register_module_forward_pre_hook(self._enter_module),
            nn.modules.module.register_module_forward_hook(self._exit_module, always_call=True),
            register_optimizer_step_pre_hook(self._enter_step),
            register_optimizer_step_post_hook(self._exit_step),
        ]
        wait = dist.Work.wait

        def wait_and_note(work: Any, *args: Any, **named: Any) -> Any:
            with self.paused():  # gloo does a part of some collectives here
                returned = wait(work, *args, **named)
            self._note_wait(work)
            return returned

        dist.Work.wait = wait_and_note  # type: ignore[method-assign]
        self._is_open = True
        try:
            with self, plain_attention():
                yield
        finally:
            self._is_open = False
            dist.Work.wait = wait  # type: ignore[method-assign]
            for handle in handles:
                handle.remove()
            for pending in list(self._pending):
                self._complete(pending)
            self._memories.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing while the block runs."""
        before, self._is_open = self._is_open, False
        try:
            yield
        finally:
            self._is_open = before

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Keep which value a tensor is that the training loop shows; see `moeverify.layout.observer.Observer`."""
        if self._is_open:
            with _disable_current_modes():
                value = None if local is None else self._find(local_part(local.detach()))
            self.program.marks[step, kind, name] = Shown(value, region)

    def begin_step(self, step: int) -> None:
        """Count the operators that follow to a step."""
        self._step = step

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if not isinstance(func, OpOverload) or any(issubclass(each, FakeTensor) for each in types):
            return func(*args, **named)
        if any(map(_has_operators, types)):
            return NotImplemented
        if not self._is_open:
            return func(*args, **named)
        if func.namespace == "c10d":
            call = read_filling(func.overloadpacket.__name__, args)
            return func(*args, **named) if call is None else self._meet(call, func, args, named)
        if func.namespace == "_c10d_functional":
            call = read_returning(func.overloadpacket.__name__, args)
            if call is not None:
                return self._meet(call, func, args, named)
        if func.overloadpacket.__name__ in _SAME:
            result = func(*args, **named)
            self._note_same(args, result)
            return result
        consists = list_decompositions().get(func)
        if consists is not None:
            with self:
                made = consists(*args, **named)
            if made is not NotImplemented:
                return made
        return self._record(func, args, named)

    def _record(self, func: OpOverload, args: Any, named: dict[str, Any]) -> Any:
        written = [
            place
            for place, argument in _pair(func, args, named)
            if argument[0].alias_info is not None and argument[0].alias_info.is_write
        ]
        taken = _encode(args, self._find)
        taken_named = {key: _encode(value, self._find) for key, value in named.items()}
        changed = [tensor for place in written for tensor in _list_tensors(_argument(args, named, place))]
        for tensor in changed:
            self._check_race(tensor, "write")
        count = _count_members(func, taken)
        if count:
            return self._record_each(func, args, named, taken, taken_named, tuple(written), count)
        op = self._begin(_name_of(func), taken, taken_named, tuple(written))
        result = func(*args, **named)
        returned = _list_tensors(result)
        with _disable_current_modes():
            new = [tensor for tensor in returned if not any(tensor is each for each in changed)]
            is_view = any(
                each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns
            )
            shown = self._view(func, taken, taken_named) if is_view else []
            values = [
                self._add_result(op, tensor, is_view=is_view, data=shown[i] if i < len(shown) else None)
                for i, tensor in enumerate(new)
            ]
            values += [self._write(op, tensor) for tensor in changed]
        op.results = tuple(values)
        if isinstance(result, bool | int | float | complex):
            op.scalar = result
        return result

    def _record_each(
        self,
        func: OpOverload,
        args: Any,
        named: dict[str, Any],
        taken: Any,
        taken_named: dict[str, Any],
        written: tuple[int | str, ...],
        count: int,
    ) -> Any:
        """Record an operator on lists as one on each of their members, which have nothing to do with each other."""
        ops = [
            self._begin(_name_of(func), _member(taken, i, count), _member_of(taken_named, i, count), written)
            for i in range(count)
        ]
        result = func(*args, **named)
        returned = list(result) if isinstance(result, tuple | list) else []
        with _disable_current_modes():
            for i, op in enumerate(ops):
                op.results = tuple(
                    self._write(op, tensor)
                    for place in written
                    for tensor in _list_tensors(_member(_argument(args, named, place), i, count))
                )
                if len(returned) == count and not written:
                    op.results = tuple(
                        self._add_result(op, tensor, is_view=False) for tensor in _list_tensors(returned[i])
                    )
        return result

    def _meet(self, call: Call, func: OpOverload, args: Any, named: dict[str, Any]) -> Any:
        taken = [Ref(self._find(tensor)) for tensor in call.inputs]
        for tensor in call.outputs:
            if not any(tensor is each for each in call.inputs):
                self._check_race(tensor, "write")
        shapes = [tuple(tensor.shape) for tensor in call.outputs]
        op = self._begin(f"collective.{call.kind}", (taken,), dict(call.options), ())
        key = (call.group.name, call.kind in ("send", "recv"), call.source, call.target)
        self._sequences[key] = self._sequences.get(key, 0) + 1
        op.meeting = Meeting(call.group, self._sequences[key], call.source, call.target)
        result = func(*args, **named)
        with _disable_current_modes():
            if func.namespace == "_c10d_functional":
                outputs = call.outputs or _list_tensors(result)
                for tensor in outputs:
                    torch.ops._c10d_functional.wait_tensor(tensor)
                op.results = tuple(
                    self._write(op, tensor) if call.outputs else self._add_result(op, tensor, is_view=False)
                    for tensor in outputs
                )
                shapes = [tuple(tensor.shape) for tensor in outputs]
            else:
                op.results = tuple(self._expect(op, call, result))
        op.kwargs["shapes"] = shapes
        return result

    def _expect(self, op: Op, call: Call, result: Any) -> Iterator[int]:
        """Yield the values that a collective will have filled in when it is waited for."""
        returned = result[-1] if isinstance(result, tuple | list) else result
        work = dist.Work.unbox(returned) if isinstance(returned, torch.ScriptObject) else None
        direct = is_direct(4)
        use = _Use(op.number, writes=True, work=work, is_direct=direct)
        if work is not None:
            reading = _Use(op.number, writes=False, work=work, is_direct=direct)
            for tensor in call.inputs:
                if not any(tensor is each for each in call.outputs):
                    self._memory(tensor).uses.append(reading)
        if not call.outputs:
            return
        values = [self._write(op, tensor, is_there=False) for tensor in call.outputs]
        self._pending.append(_Pending(values, call.outputs, use))
        for tensor in call.outputs:
            self._memory(tensor).uses.append(use)
        yield from values

    def _note_wait(self, work: Any) -> None:
        for pending in list(self._pending):
            if pending.use.work is work:
                self._complete(pending)
        for memory in self._memories.values():
            memory.uses = [use for use in memory.uses if use.work is not work]

    def _complete(self, pending: _Pending) -> None:
        """Keep what a collective has filled in."""
        self._pending.remove(pending)
        with _disable_current_modes():
            for number, tensor in zip(pending.values, pending.tensors, strict=True):
                value = self.program.values[number]
                if value.data is None:
                    value.data = self._copy(tensor)

    def _check_race(self, tensor: Tensor, kind: str) -> None:
        """Note a use of memory that a collective is still using; see `Race`."""
        memory = self._memories.get(_storage_of(tensor))
        for use in memory.uses if memory is not None else ():
            if kind == "write" or use.writes:
                self.program.races.append(Race(use.op, len(self.program.ops), kind, use.is_direct))
        if memory is not None and memory.uses:
            for pending in list(self._pending):
                if any(pending.use is use for use in memory.uses):
                    self._complete(pending)
            memory.uses = []

    def _begin(self, name: str, args: Any, named: dict[str, Any], written: tuple[int | str, ...]) -> Op:
        op = Op(len(self.program.ops), name, tuple(args), named, written=written, sites=find_sites(4))
        op.step = self._step
        op.module = self._modules[-1] if self._modules else ""
        if torch._C._current_graph_task_id() >= 0:
            op.phase = "backward"
            node = torch._C._current_autograd_node()
            sequence = node._sequence_nr() if node is not None else _NO_NODE
            op.origin = self._origins.get(sequence, -1)
            if op.origin >= 0 and not op.module:
                op.module = self.program.ops[op.origin].module
        elif self._is_step:
            op.phase = "step"
        else:
            self._origins.setdefault(torch._C._autograd._get_sequence_nr() - 1, op.number)
        self.program.ops.append(op)
        return op

    def _note_same(self, args: Any, result: Any) -> None:
        """Know a result by the value of what it was made from, where it does not share its memory."""
        for source, tensor in zip(_list_tensors(args), _list_tensors(result), strict=False):
            if _storage_of(tensor) != _storage_of(source):
                number = self._find(source)
                self._memory(tensor).entries[_geometry(tensor), tensor.dtype] = (
                    number,
                    self._memory(tensor).epoch,
                )
                self._memory(tensor).writes.append((number, _geometry(tensor)))

    def _memory(self, tensor: Tensor) -> _Memory:
        key = _storage_of(tensor)
        memory = self._memories.get(key)
        if memory is None:
            memory = self._memories[key] = _Memory(StorageWeakRef(tensor.untyped_storage()))
        return memory

    def _view(self, func: OpOverload, args: Any, named: Any) -> list[Tensor]:
        """Return the same views of the copies that are kept, which need no memory of their own."""
        try:
            return _list_tensors(execute(func, args, named, lambda number: self.program.values[number].data))
        except (NotExecutable, AttributeError, RuntimeError, TypeError):
            return []

    def _add_result(self, op: Op, tensor: Tensor, *, is_view: bool, data: Tensor | None = None) -> int:
        """Keep a tensor that an operator has returned; `data` is the same view of a copy, if there is one."""
        key = _storage_of(tensor)
        is_view = (is_view and bool(list(op.refs()))) or key in self._memories
        value = self._new(op.number, tensor)
        if is_view:
            value.alias = next(op.refs(), -1)
        memory = self._memory(tensor)
        if not is_view:
            memory.writes.append((value.number, _geometry(tensor)))
        value.data = self._copy(tensor) if data is None or data.shape != tensor.shape else data
        memory.entries[_geometry(tensor), tensor.dtype] = (value.number, memory.epoch)
        return value.number

    def _write(self, op: Op, tensor: Tensor, *, is_there: bool = True) -> int:
        """Keep a tensor that an operator has written."""
        value = self._new(op.number, tensor)
        if is_there:
            value.data = self._copy(tensor)
        memory, geometry = self._memory(tensor), _geometry(tensor)
        memory.epoch += 1
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        if tensor.numel() >= size:
            memory.writes.clear()
        memory.writes.append((value.number, geometry))
        memory.entries[geometry, tensor.dtype] = (value.number, memory.epoch)
        return value.number

    def _new(self, op: int, tensor: Tensor) -> Value:
        label = self._names.get(_storage_of(tensor), "")
        value = Value(len(self.program.values), op, tuple(tensor.shape), str(tensor.dtype)[6:], label=label)
        self.program.values.append(value)
        return value

    def _copy(self, tensor: Tensor) -> Tensor | None:
        self._room -= tensor.numel()
        if self._room < 0:
            self.program.is_complete = False
            return None
        return tensor.detach().resolve_conj().resolve_neg().to("cpu", copy=True)

    def _find(self, tensor: Tensor) -> int:
        """Return the value of a tensor, a new one where nothing recorded has made it."""
        with _disable_current_modes():
            memory, geometry = self._memory(tensor), _geometry(tensor)
            if memory.uses:
                self._check_race(tensor, "read")
            known = memory.entries.get((geometry, tensor.dtype))
            if known is None or known[1] != memory.epoch:
                number = self._read(memory, tensor, geometry)
            else:
                number = known[0]
            data = self.program.values[number].data
            if data is not None and not _is_equal(data, tensor):
                number = self._add_pseudo(UNSEEN, tensor, (), (number,))
                memory.epoch += 1
                memory.writes = [(number, geometry)]
            memory.entries[geometry, tensor.dtype] = (number, memory.epoch)
            return number

    def _read(self, memory: _Memory, tensor: Tensor, geometry: Geometry) -> int:
        """Return the value of memory that was written in parts, or that nothing recorded has written."""
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        same_dtype = all(
            self.program.values[number].dtype == str(tensor.dtype)[6:] for number, _ in memory.writes
        )
        if (
            memory.writes
            and same_dtype
            and _is_covered(size, [place for _, place in memory.writes], geometry)
        ):
            numbers = tuple(number for number, _ in memory.writes)
            places = tuple(place for _, place in memory.writes)
            return self._add_pseudo(READ, tensor, (places, geometry, size), numbers)
        number = self._add_pseudo(LEAF, tensor, (), ())
        memory.writes.append((number, geometry))
        return number

    def _add_pseudo(
        self, name: str, tensor: Tensor, options: tuple[Any, ...], sources: tuple[int, ...]
    ) -> int:
        op = self._begin(f"memory.{name}", ([Ref(each) for each in sources], *options), {}, ())
        value = self._new(op.number, tensor)
        value.data = self._copy(tensor)
        op.results = (value.number,)
        return value.number

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        self._modules.append(self._fqns.get(id(module), self._modules[-1] if self._modules else ""))

    def _exit_module(self, module: nn.Module, _: Any, output: Any) -> None:
        if self._modules:
            self._modules.pop()
        name = self._fqns.get(id(module))
        if name is None or not self._is_open:
            return
        step = self._step
        count = self._calls[step, name] = self._calls.get((step, name), -1) + 1
        for slot, tensor in enumerate(_list_floats(output)):
            with _disable_current_modes():
                self.program.ends.append(
                    End(step, name, False, slot, count, self._find(local_part(tensor.detach())))
                )
            if tensor.requires_grad:
                tensor.register_hook(self._make_gradient_hook(step, name, slot, count))  # type: ignore[no-untyped-call]

    def _make_gradient_hook(self, step: int, name: str, slot: int, count: int) -> Any:
        def note(gradient: Tensor) -> None:
            if self._is_open:
                with _disable_current_modes():
                    number = self._find(local_part(gradient.detach()))
                self.program.ends.append(End(step, name, True, slot, count, number))

        return note

    def _enter_step(self, *_: Any) -> None:
        self._is_step += 1

    def _exit_step(self, *_: Any) -> None:
        self._is_step -= 1


def _storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _geometry(tensor: Tensor) -> Geometry:
    return Geometry(tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def _has_operators(kind: type) -> bool:
    """Return whether a class of tensors says itself what an operator does."""
    return getattr(kind, "__torch_dispatch__", None) not in (None, Tensor.__torch_dispatch__, _NO_OPERATORS)


def _name_of(func: OpOverload) -> str:
    return f"{func.namespace}.{func.overloadpacket.__name__}.{func._overloadname}"


def _pair(
    func: OpOverload, args: Any, named: Mapping[str, Any]
) -> Iterator[tuple[int | str, tuple[Any, Any]]]:
    """Yield the place of each argument, with its declaration and its value."""
    for number, argument in enumerate(func._schema.arguments):
        if number < len(args):
            yield number, (argument, args[number])
        elif argument.name in named:
            yield argument.name, (argument, named[argument.name])


def _argument(args: Sequence[Any], named: Mapping[str, Any], place: int | str) -> Any:
    return named[place] if isinstance(place, str) else args[place]


def _encode(value: Any, find: Any) -> Any:
    """Return an argument as data."""
    if isinstance(value, Tensor):
        return Ref(find(value)) if _has_memory(value) else f"<{value.layout} tensor>"
    if isinstance(value, list):
        return [_encode(each, find) for each in value]
    if isinstance(value, tuple):
        return tuple(_encode(each, find) for each in value)
    if value is None or isinstance(
        value,
        bool | int | float | complex | str | torch.dtype | torch.device | torch.layout | torch.memory_format,
    ):
        return value
    return f"<{type(value).__name__}>"


def _list_tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if _has_memory(value) else []
    if isinstance(value, list | tuple):
        return [each for part in value for each in _list_tensors(part)]
    return []


def _list_floats(value: Any) -> list[Tensor]:
    """Return the tensors of numbers in what a module returns."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() and value.numel() else []
    if isinstance(value, dict):
        value = list(value.values())
    return [each for part in value for each in _list_floats(part)] if isinstance(value, list | tuple) else []


def _count_members(func: OpOverload, taken: Sequence[Any]) -> int:
    """Return on how many tensors an operator on lists works one by one; 0 if it is not such an operator."""
    if not func.overloadpacket.__name__.startswith(
        ("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad")
    ):
        return 0
    sizes = {
        len(each)
        for each in taken
        if isinstance(each, list | tuple) and any(isinstance(x, Ref) for x in each)
    }
    return sizes.pop() if len(sizes) == 1 else 0


def _member(values: Any, number: int, count: int) -> Any:
    """Return arguments with lists of one member each in place of lists of so many."""

    def take(value: Any) -> Any:
        if isinstance(value, list | tuple) and len(value) == count:
            return [value[number]]
        return value

    return (
        [take(each) for each in values]
        if isinstance(values, list | tuple) and not _is_list(values, count)
        else take(values)
    )


def _is_list(values: Any, count: int) -> bool:
    return len(values) == count and all(isinstance(each, Tensor | Ref) for each in values)


def _member_of(named: Mapping[str, Any], number: int, count: int) -> dict[str, Any]:
    return {
        name: _member(value, number, count) if isinstance(value, list | tuple) else value
        for name, value in named.items()
    }


def _has_memory(tensor: Tensor) -> bool:
    return (
        tensor.layout == torch.strided and tensor.device.type != "meta" and not isinstance(tensor, FakeTensor)
    )


def _is_equal(data: Tensor, tensor: Tensor) -> bool:
    """Return whether a copy has the bits of a tensor, where NaN equals NaN."""
    actual = tensor.detach().resolve_conj().resolve_neg().to("cpu")
    if torch.equal(data, actual):
        return True
    if not data.is_floating_point():
        return False
    return bool(((data == actual) | (data.isnan() & actual.isnan())).all())


def _is_covered(size: int, places: Sequence[Geometry], wanted: Geometry) -> bool:
    """Return whether what was written covers what is read."""
    seen = torch.zeros(size, dtype=torch.bool)
    for place in places:
        seen.as_strided(place.shape, place.stride, place.offset).fill_(True)
    return bool(seen.as_strided(wanted.shape, wanted.stride, wanted.offset).all())
