"""Recorder of every operator of a step, with its inputs, its results and the line that called it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.hooks import RemovableHandle

from moeverify.explain.arguments import (
    argument_at,
    count_members,
    encode,
    geometry_of,
    has_memory,
    has_operators,
    is_any,
    is_equal,
    list_tensors,
    list_visible,
    member,
    member_of,
    name_of,
    pair,
    storage_of,
)
from moeverify.explain.fused import list_decompositions, plain_attention
from moeverify.explain.groups import follow_groups
from moeverify.explain.lines import Lines, untraced
from moeverify.explain.meetings import Call, read_filling, read_returning
from moeverify.explain.memory import Memory, Pending, Use
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
from moeverify.explain.sites import find_sites, is_direct, is_in_function
from moeverify.explain.waits import Waits
from moeverify.parallel.regions.local_shard import logical_name
from moeverify.parallel.regions.passes import is_in_backward, is_trial_pass
from moeverify.parallel.regions.placement import local_part
from moeverify.parallel.regions.region import Region
from moeverify.train.module_taps import hook_gradient, list_floats

MOST_ELEMENTS = 1 << 28
"""Maximum number of elements kept of a program's values: 2 GiB in float64."""

_SAME = frozenset({"detach", "alias", "lift_fresh", "wait_tensor", "_wrap_tensor_autograd"})
"""Operators whose result is the tensor that they take."""

_READERS = {"c10d": read_filling, "_c10d_functional": read_returning}
"""Maps a namespace to the function that reads a collective from its operator's arguments."""

_NO_NODE = 1 << 63
"""Autograd sequence numbers from here on belong to the accumulation of gradients, not to an operator."""


def _without_modes() -> AbstractContextManager[object]:
    """Hide operators from dispatch modes. Within `__torch_dispatch__` usually none is active."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """Dispatch mode that records the operators of this process in `program` while `recording` is entered.

    Tensors are identified by their memory. So a detached tensor, a tensor saved by autograd and a gathered
    parameter keep their values. Values are compared with the memory at each use: a change without an
    operator is recorded as `UNSEEN`. Tensor subclasses are recorded as the plain tensors that they hold.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compiled code stays compiled and counts as one operator."""
        return True

    def __init__(self, limit: int = MOST_ELEMENTS) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.program = Program()
        self._names: dict[int, str] = {}
        self._room = limit
        self._is_open = False
        self._memories: dict[int, Memory] = {}
        self._pending: list[Pending] = []
        self._origins: dict[int, int] = {}
        self._waits = Waits(self._note_wait, self.paused)
        self._lines = Lines(self.program)
        self._modules: list[str] = []
        self._fqns: dict[int, str] = {}
        self._calls: dict[tuple[int, str], int] = {}
        self._is_step, self._step = 0, SETUP
        self._sequences: dict[tuple[Any, ...], int] = {}

    def name_tensors(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Set the labels of existing tensors."""
        for name, tensor in named:
            with _without_modes():
                local = local_part(tensor.detach())
                self._names[storage_of(local)] = name
                if has_memory(local) and local.numel():
                    self.program.values[self._find(local)].label = name

    def name_modules(self, model: nn.Module) -> None:
        """Register the FQNs of a model's modules."""
        self._fqns |= {id(module): logical_name(name) for name, module in model.named_modules()}

    @contextmanager
    def recording(self, *, hooks_optimizers: bool = True) -> Iterator[None]:
        """Record during the block.

        With `hooks_optimizers=False`, operators of optimizers are not distinguished from others. Then the
        block may end in a hook of an optimizer's step, where the hooks of optimizers must not change.
        """
        handles = [
            nn.modules.module.register_module_forward_pre_hook(self._enter_module),
            nn.modules.module.register_module_forward_hook(self._exit_module, always_call=True),
            *(self._hook_optimizers() if hooks_optimizers else ()),
        ]
        self._is_open = True
        groups = follow_groups(self.program)
        try:
            with self._waits.following(), groups, self, plain_attention(), self._lines.following():
                yield
        finally:
            self._is_open = False
            for handle in handles:
                handle.remove()
            for pending in list(self._pending):
                self._complete(pending)
            self._memories.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend recording during the block."""
        before, self._is_open = self._is_open, False
        try:
            yield
        finally:
            self._is_open = before

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Record which value the training loop shows; see `moeverify.parallel.regions.observer.Observer`."""
        if self._is_open:
            with _without_modes():
                value = None if local is None else self._find(local_part(local.detach()))
            self.program.marks.setdefault((step, kind, name), []).append(Shown(value, region))

    def begin_step(self, step: int) -> None:
        """Set the step of the operators that follow."""
        self._step = step
        self._lines.begin(step)

    @untraced
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        is_fake = any(issubclass(each, FakeTensor) for each in types)
        if is_fake or not (self._is_open and isinstance(func, OpOverload)):
            return func(*args, **named)
        if func is torch.ops.aten.detach.default and args[0].requires_grad and is_direct():
            self.program.note_cuts([self._find(local_part(args[0]))], find_sites(2))
        if any(map(has_operators, types)):
            return NotImplemented
        read = _READERS.get(func.namespace)
        call = None if read is None else read(func.overloadpacket.__name__, args)
        if call is not None:
            return self._meet(call, func, args, named)
        return func(*args, **named) if func.namespace == "c10d" else self._note(func, args, named)

    def _note(self, func: OpOverload, args: Any, named: dict[str, Any]) -> Any:
        """Call an operator that is not a collective, and record it or its parts."""
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
            for place, argument in pair(func, args, named)
            if argument[0].alias_info is not None and argument[0].alias_info.is_write
        ]
        infos = [each.alias_info for each in func._schema.returns]
        is_view = any(each is not None and not each.is_write for each in infos)
        find = self._find_viewed if is_view else self._find  # a view reads no memory
        taken, taken_named = encode(args, find), {key: encode(value, find) for key, value in named.items()}
        changed = [tensor for place in written for tensor in list_tensors(argument_at(args, named, place))]
        for tensor in changed:
            self._check_race(tensor, "write")
        count = count_members(func, taken)
        if count:
            return self._record_each(func, args, named, taken, taken_named, tuple(written), count)
        op = self._begin(name_of(func), taken, taken_named, tuple(written))
        result = func(*args, **named)
        with _without_modes():
            returned = list_tensors(result)
            new = [tensor for tensor in returned if not is_any(tensor, changed)]
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
        """Record a list operator as one operator for each member: members are independent."""
        ops = [
            self._begin(name_of(func), member(taken, i, count), member_of(taken_named, i, count), written)
            for i in range(count)
        ]
        result = func(*args, **named)
        returned = list(result) if isinstance(result, tuple | list) else []
        with _without_modes():
            for i, op in enumerate(ops):
                op.results = tuple(
                    self._write(op, tensor)
                    for place in written
                    for tensor in list_tensors(member(argument_at(args, named, place), i, count))
                )
                if len(returned) == count and not written:
                    op.results = tuple(
                        self._add_result(op, tensor, is_view=False) for tensor in list_tensors(returned[i])
                    )
        return result

    def _meet(self, call: Call, func: OpOverload, args: Any, named: dict[str, Any]) -> Any:
        taken = [Ref(self._find(tensor)) for tensor in call.inputs]
        for tensor in call.outputs:
            if not is_any(tensor, call.inputs):
                self._check_race(tensor, "write")
        cut = [each for each in call.inputs if each.requires_grad and not is_any(each, call.outputs)]
        if cut and (torch.is_grad_enabled() or not is_in_function()):  # autograd does not see a collective
            cut = [each for each in cut if torch.is_grad_enabled() or not each.is_leaf]
            self.program.note_cuts(map(self._find, cut), find_sites(2))
        shapes = [tuple(tensor.shape) for tensor in call.outputs]
        op = self._begin(f"collective.{call.kind}", (taken,), dict(call.options), ())
        key = (call.group.name, call.kind in ("send", "recv"), call.source, call.target)
        self._sequences[key] = self._sequences.get(key, 0) + 1
        op.meeting = Meeting(call.group, self._sequences[key], call.source, call.target)
        result = func(*args, **named)
        with _without_modes():
            if func.namespace == "_c10d_functional":
                outputs = call.outputs or list_tensors(result)
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
        """Yield the output values of a collective. Their data is filled in when the program waits for it."""
        returned = result[-1] if isinstance(result, tuple | list) else result
        work = dist.Work.unbox(returned) if isinstance(returned, torch.ScriptObject) else None
        direct = is_direct(4)
        for tensor in call.inputs if work is not None else ():
            if not is_any(tensor, call.outputs):
                self._use(tensor, op, work, direct, writes=False)
        values = [self._write(op, tensor, is_there=False) for tensor in call.outputs]
        self._pending.append(Pending(values, call.outputs, op.number, work))
        for tensor in call.outputs:
            self._use(tensor, op, work, direct, writes=True)
        yield from values

    def _use(self, tensor: Tensor, op: Op, work: Any, direct: bool, *, writes: bool) -> None:
        place, size = geometry_of(tensor), tensor.element_size()
        self._memory(tensor).uses.append(Use(op.number, writes, work, direct, place, size))

    def _note_wait(self, work: Any) -> None:
        for pending in [each for each in self._pending if each.work is work]:
            self._complete(pending)
        for memory in self._memories.values():
            memory.uses = [use for use in memory.uses if use.work is not work]

    def _complete(self, pending: Pending) -> None:
        """Copy the data of a collective's outputs."""
        self._pending.remove(pending)
        with _without_modes():
            for number, tensor in zip(pending.values, pending.tensors, strict=True):
                value = self.program.values[number]
                if value.data is None:
                    value.data = self._copy(tensor)

    def _check_race(self, tensor: Tensor, kind: str) -> None:
        """Record a use of memory that a collective may still be using; see `Race`."""
        memory = self._memories.get(storage_of(tensor))
        if not (memory and memory.uses) or any(use.work is self._waits.in_callback for use in memory.uses):
            return  # a collective's callback may use its memory
        raced = {use.op: use for use in memory.take_raced(geometry_of(tensor), tensor.element_size(), kind)}
        self.program.races += [Race(op, len(self.program.ops), kind, raced[op].is_direct) for op in raced]
        for pending in [each for each in self._pending if each.op in raced]:
            self._complete(pending)

    def _begin(self, name: str, args: Any, named: dict[str, Any], written: tuple[int | str, ...]) -> Op:
        op = Op(len(self.program.ops), name, tuple(args), named, written=written, sites=find_sites(4))
        op.step = self._step
        op.module = self._modules[-1] if self._modules else ""
        if is_in_backward():
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
        """Give the operand's value to a result that is the same tensor in other memory."""
        for source, tensor in zip(list_tensors(args), list_tensors(result), strict=False):
            if storage_of(tensor) != storage_of(source):
                number, memory, geometry = self._find(source), self._memory(tensor), geometry_of(tensor)
                memory.entries[geometry, tensor.dtype] = (number, memory.epoch)
                memory.writes.append((number, geometry))

    def _memory(self, tensor: Tensor) -> Memory:
        key = storage_of(tensor)
        memory = self._memories.get(key)
        if memory is None:
            memory = self._memories[key] = Memory(StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]
        return memory

    def _view(self, func: OpOverload, args: Any, named: Any) -> list[Tensor]:
        """Return the same views of the kept copies, which need no extra memory."""
        try:
            return list_tensors(execute(func, args, named, lambda number: self.program.values[number].data))
        except (NotExecutable, AttributeError, RuntimeError, TypeError):
            return []

    def _add_result(self, op: Op, tensor: Tensor, *, is_view: bool, data: Tensor | None = None) -> int:
        """Add a tensor that an operator returned. `data` is the same view of a kept copy, if there is one."""
        key = storage_of(tensor)
        is_view = (is_view and bool(list(op.refs()))) or key in self._memories
        value = self._new(op.number, tensor)
        if is_view:
            value.alias = next(op.refs(), -1)
        memory = self._memory(tensor)
        if not is_view:
            memory.writes.append((value.number, geometry_of(tensor)))
        value.data = self._copy(tensor) if data is None or data.shape != tensor.shape else data
        memory.entries[geometry_of(tensor), tensor.dtype] = (value.number, memory.epoch)
        return value.number

    def _write(self, op: Op, tensor: Tensor, *, is_there: bool = True) -> int:
        """Add a tensor that an operator wrote."""
        value = self._new(op.number, tensor)
        if is_there:
            value.data = self._copy(tensor)
        memory, geometry = self._memory(tensor), geometry_of(tensor)
        memory.epoch += 1
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        if tensor.numel() >= size:
            memory.writes.clear()
        memory.writes.append((value.number, geometry))
        memory.entries[geometry, tensor.dtype] = (value.number, memory.epoch)
        return value.number

    def _new(self, op: int, tensor: Tensor) -> Value:
        storage, values = storage_of(tensor), self.program.values
        value = Value(len(values), op, tuple(tensor.shape), str(tensor.dtype)[6:])
        value.label, value.place = self._names.get(storage, ""), (storage, geometry_of(tensor))
        values.append(value)
        return value

    def _copy(self, tensor: Tensor) -> Tensor | None:
        self._room -= tensor.numel()
        if self._room < 0:
            self.program.is_complete = False
            return None
        return tensor.detach().resolve_conj().resolve_neg().to("cpu", copy=True)

    def _find(self, tensor: Tensor) -> int:
        """Return the value of a tensor; make a new value if no recorded operator computed it."""
        with _without_modes():
            self._check_race(tensor, "read")
        return self._find_viewed(tensor)

    def _find_viewed(self, tensor: Tensor) -> int:
        with _without_modes():
            memory, geometry = self._memory(tensor), geometry_of(tensor)
            known = memory.entries.get((geometry, tensor.dtype))
            is_known = known is not None and known[1] == memory.epoch
            number = known[0] if known and is_known else self._read(memory, tensor, geometry)
            data = self.program.values[number].data
            if data is not None and not is_equal(data, tensor):
                number = self._add_pseudo(UNSEEN, tensor, (), (number,))
                memory.epoch += 1
                memory.writes = [(number, geometry)]
            memory.entries[geometry, tensor.dtype] = (number, memory.epoch)
            return number

    def _read(self, memory: Memory, tensor: Tensor, geometry: Geometry) -> int:
        """Return the value of memory that was written in parts, or by no recorded operator."""
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        same_dtype = all(
            self.program.values[number].dtype == str(tensor.dtype)[6:] for number, _ in memory.writes
        )
        shown = list_visible(size, memory.writes, geometry) if same_dtype else []
        if shown:
            numbers, places = zip(*shown, strict=True)
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
        if name is None or not self._is_open or is_trial_pass():
            return
        step = self._step
        count = self._calls[step, name] = self._calls.get((step, name), -1) + 1
        for slot, tensor in enumerate(each for _, each in list_floats(output) if each.numel()):
            with _without_modes():
                self.program.ends.append(
                    End(step, name, False, slot, count, self._find(local_part(tensor.detach())))
                )
            if tensor.requires_grad:
                hook_gradient(tensor, self._make_gradient_hook(step, name, slot, count))

    def _make_gradient_hook(self, step: int, name: str, slot: int, count: int) -> Any:
        def note(gradient: Tensor) -> None:
            if self._is_open:
                with _without_modes():
                    number = self._find(local_part(gradient.detach()))
                self.program.ends.append(End(step, name, True, slot, count, number))

        return note

    def _hook_optimizers(self) -> Iterator[RemovableHandle]:
        yield register_optimizer_step_pre_hook(self._enter_step)
        yield register_optimizer_step_post_hook(self._exit_step)

    def _enter_step(self, *_: Any) -> None:
        self._is_step += 1

    def _exit_step(self, *_: Any) -> None:
        self._is_step -= 1
