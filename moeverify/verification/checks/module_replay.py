"""Replay of a user's modules: one device's module on the inputs and output gradients that a rank had.

The rank's module, one device's module in the same precision and one device's module in float64 get the same
inputs. Only the rounding of one module is left between them, and the two modules of one device measure it.

A module is replayed if its input has the rank's rows and positions. Then a mesh axis may divide the batch, or
the inside of the module, but neither its input nor its output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from moeverify.parallel.regions.local_shard import logical_name
from moeverify.parallel.regions.passes import is_in_backward
from moeverify.parallel.regions.unseen import unseen
from moeverify.train.module_taps import hook_gradient, list_floats
from moeverify.train.selections import HeldSelections, RecordedSelections, Selection

MOST_ELEMENTS = 1 << 26
"""Maximum number of elements that are kept of a step: 128 MiB in bfloat16."""

_NUDGE = 0.5  # perturbation of the inputs of further runs, in units of rounding
_NUDGED_RUNS = 2
_STABLE = 8.0  # times the median error of a row; a row beyond it made another choice, such as of experts
_MOST_UNMIXED = 4.0  # units of rounding, relative to the largest number
_LEAST_STABLE = 0.75  # share of the rows
MOST_ROUNDING = 2.0**-4  # relative; beyond it a bound of eight times the rounding is inconclusive


@dataclass
class ModuleCall:
    """A call of a module on this rank: inputs, outputs, and the gradients that came back.

    `outputs` and `of_outputs` are keyed by slot (`list_floats`), and `of_inputs` by the slot of the input.
    `selections` are the choices that the module made.
    """

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    outputs: dict[str, Tensor] = field(default_factory=dict)
    of_outputs: dict[str, Tensor] = field(default_factory=dict)
    of_inputs: dict[str, Tensor] = field(default_factory=dict)
    selections: Sequence[Selection] = ()


@dataclass(frozen=True)
class Replayed:
    """One tensor of a rank compared with the replayed ones.

    `end` is `output` or `gradient of its input`. `error` and `rounding` are relative to the norm of the
    float64 result, without the rows that made another choice. `rounding` is the error of one device's module.
    """

    module: str
    end: str
    error: float
    rounding: float


class KeptCalls:
    """Hooks that keep the calls of each chosen module since `take`, with gradients, as many as fit.

    The part of an input's gradient that comes from the module is read from the operations of the module that
    take the input. Nothing is added to the graph: another order of sums would be another rounding.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.found: dict[str, list[ModuleCall]] = {}
        self.incomplete: set[str] = set()  # modules with calls that were not kept
        self._room = MOST_ELEMENTS
        self._entered: dict[str, _Entered] = {}
        # One context for all calls: torch compiles functions again under another one.
        self._recording = RecordedSelections()
        self._is_recording = False
        self._handles: list[RemovableHandle] = []
        for name, module in modules.items():
            enter = unseen(self._make_pre_hook(name))
            self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            leave = unseen(self._make_hook(name))
            # Without `always_call`: with it torch compiles a compiled module again for each call.
            self._handles.append(module.register_forward_hook(leave))

    def take(self) -> dict[str, list[ModuleCall]]:
        """Return the calls so far of modules whose calls were all kept, and forget them."""
        found = {name: calls for name, calls in self.found.items() if name not in self.incomplete}
        self.found, self.incomplete = {}, set()
        return found

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._entered.clear()
        self._end_recording()

    def _end_recording(self) -> None:
        if self._is_recording and not self._entered:
            self._recording.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._is_recording = False
            self._recording.made.clear()

    def _make_pre_hook(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            # `is_compiling` comes first: the compiler cannot trace the other calls.
            is_training = (
                not torch.compiler.is_compiling() and torch.is_grad_enabled() and not is_in_backward()
            )
            if not is_training:
                return
            size = sum(each.numel() for each in _list_tensors((args, kwargs)))
            if size > self._room or name in self._entered:
                self.incomplete.add(name)
                return
            self._room -= size
            taken = (tuple(args), dict(kwargs))
            floats = [(slot, each) for slot, each in list_floats(taken) if each.grad_fn is not None]
            edges = {_Edge(each.grad_fn, each.output_nr): slot for slot, each in floats}
            # If one tensor is several inputs, the parts of its gradient cannot be separated.
            edges = edges if len(edges) == len(floats) else {}
            if not self._is_recording:
                self._is_recording = True
                self._recording.__enter__()  # type: ignore[no-untyped-call]
            call = ModuleCall(*_map(_copy, taken))
            self._entered[name] = _Entered(call, edges, len(self._recording.made))
            self.found.setdefault(name, []).append(call)

        return hook

    def _make_hook(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            entered = None if torch.compiler.is_compiling() else self._entered.pop(name, None)
            if entered is None:
                return
            call, edges = entered.call, entered.edges
            call.selections = tuple(self._recording.made[entered.num_selections :])
            self._end_recording()
            for slot, tensor in list_floats(output):
                call.outputs[slot] = _copy(tensor)
                if tensor.requires_grad:
                    hook_gradient(tensor, _keep(call.of_outputs, slot))
            _read_back([tensor.grad_fn for _, tensor in list_floats(output)], edges, call.of_inputs)

        return hook


@dataclass(frozen=True)
class _Entered:
    """A call that has not returned: its input's edges, and the number of choices before it."""

    call: ModuleCall
    edges: Mapping[_Edge, str]
    num_selections: int


class _Edge(NamedTuple):
    """A tensor in the graph: the operation that made it, and which of its results it is."""

    node: Any
    number: int


def _read_back(made: Sequence[Any], edges: Mapping[_Edge, str], found: dict[str, Tensor]) -> None:
    """Add the gradients that operations between `made` and the `edges` pass to these to `found`, by slot."""
    ends = {edge.node for edge in edges}
    open_ones = [node for node in made if node is not None and node not in ends]
    seen = set(open_ones)
    while open_ones:
        node = open_ones.pop()
        taken = [edges.get(_Edge(*each)) for each in node.next_functions]
        if any(slot is not None for slot in taken):
            node.register_hook(_adds(found, taken))
        for before, _ in node.next_functions:
            if before is not None and before not in ends and before not in seen:
                seen.add(before)
                open_ones.append(before)


def _adds(found: dict[str, Tensor], slots: Sequence[str | None]) -> Callable[..., None]:
    def add(of_inputs: Sequence[Tensor | None], of_results: Sequence[Tensor | None]) -> None:
        for slot, gradient in zip(slots, of_inputs, strict=False):
            if slot is None or gradient is None:
                continue
            part = _copy(gradient)
            if not isinstance(part, DTensor):
                part = part.to(torch.float64)
            known = found.get(slot)
            found[slot] = part if known is None else known + part

    return add


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    """Return the value with `change` applied to its members. Objects of a user's classes are members themselves."""
    if type(value) in (tuple, list):
        return type(value)(_map(change, each) for each in value)
    if type(value) is dict:
        return {key: _map(change, each) for key, each in value.items()}
    return change(value)


def _list_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _list_tensors(each)


def _keep(found: dict[str, Tensor], slot: str) -> Callable[[Tensor], None]:
    def keep(gradient: Tensor) -> None:
        found[slot] = _copy(gradient)

    return keep


def _copy(value: Any) -> Any:
    """Return a copy of a tensor: plain, unless a DTensor is partial or sharded over another dim than its rows."""
    if not isinstance(value, Tensor):
        return value
    local = value.detach()
    if isinstance(local, DTensor) and all(
        each.is_replicate() or each.is_shard(0) for each in local.placements
    ):
        local = local.to_local()
    return local.clone()


class Obstacle(Exception):
    """Reason why a module cannot be replayed; the text follows the name of the module."""


def choose_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules to replay by FQN: blocks, the members of each block, and other members of the root.

    A container without a forward pass counts for its members. Modules without parameters and buffers, such as
    activations, are left to the module around them.
    """
    found: dict[str, nn.Module] = {}
    for name, module in _list_children(model):
        found[logical_name(name)] = module
        if logical_name(name).rpartition(".")[2].isdecimal():
            found |= {logical_name(f"{name}.{inner}"): each for inner, each in _list_children(module)}
    return {name: module for name, module in found.items() if name}


def _list_children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    for name, child in module.named_children():
        is_wrapper = not logical_name(name)
        if is_wrapper or isinstance(child, nn.ModuleList | nn.ModuleDict):
            found += [(f"{name}.{inner}", each) for inner, each in _list_children(child)]
        elif any(True for _ in (*child.parameters(), *child.buffers())):
            found.append((name, child))
    return found


def replay(
    name: str, call: ModuleCall, narrow: nn.Module, wide: nn.Module, tokens: tuple[int, int], unit: float
) -> list[Replayed]:
    """Return the outputs of a call and the gradients of its inputs, next to those of one device.

    `narrow` and `wide` are one device's module in the rank's precision and in float64. `tokens` are the rows
    and positions of the rank's micro-batch. `unit` is the distance from 1.0 to the next number.

    Raises: Obstacle.
    """
    require_tokens(call, tokens)
    try:
        alike = [run(narrow, call, nn.Identity(), unit)[0]]
        alike += [run(narrow, call, _Nudge(_NUDGE * unit, seed), unit)[0] for seed in range(_NUDGED_RUNS)]
        exact = run(wide, call, Widen(), unit)[0]
    except Obstacle:
        raise
    except Exception as error:  # of user code, such as another signature
        raise Obstacle("does not run on one device with the rank's inputs") from error
    found = []
    for end, of_rank in (("output", call.outputs), ("gradient of its input", call.of_inputs)):
        for slot, actual in of_rank.items():
            key = (end, slot)
            if any(key not in each for each in (exact, *alike)):
                continue
            if not _has_tokens(exact[key].shape, tokens) or not exact[key].any():
                continue
            if isinstance(actual, DTensor) or actual.shape != exact[key].shape:
                raise Obstacle("is divided inside of its input or output")
            compared = _compare(actual, [each[key] for each in alike], exact[key], tokens)
            if compared is None:
                raise Obstacle("makes choices that rounding flips")
            found.append(Replayed(name, end, *compared))
    if not found:
        raise Obstacle("returns nothing with the rank's rows and positions")
    return found


def mixes_positions(call: ModuleCall, module: nn.Module, tokens: tuple[int, int], unit: float) -> bool:
    """Return whether the outputs of one device's module at a position depend on other positions.

    Runs each half of the positions alone. A module mixes positions also if it fails on a half, or returns no
    tokens.
    """
    positions = tokens[1]
    middle = positions // 2
    for part in (slice(0, middle), slice(middle, positions)):

        def cut(value: Any, part: slice = part) -> Any:
            if not isinstance(value, Tensor) or not _has_tokens(value.shape, tokens):
                return value
            is_flat = value.shape[:2] != tokens
            return value.reshape(*tokens, -1)[:, part].flatten(0, 1) if is_flat else value[:, part]

        half = ModuleCall(*_map(cut, (tuple(call.args), dict(call.kwargs))))
        try:
            found, _ = run(module, half, nn.Identity(), unit)
        except Exception:  # of user code, such as another number of positions
            return True
        for slot, whole in call.outputs.items():
            expected, actual = cut(whole), found.get(("output", slot))
            if expected is whole or actual is None or expected.shape != actual.shape:
                return True
            size = float(whole.abs().max())
            if not float((actual - expected).abs().max()) <= _MOST_UNMIXED * unit * size:
                return True
    return False


def require_tokens(call: ModuleCall, tokens: tuple[int, int]) -> None:
    """Refuse a call whose input is divided, or has no rows and positions. Raises: Obstacle."""
    tensors = list(_list_tensors((call.args, call.kwargs)))
    if any(isinstance(each, DTensor) for each in tensors):
        raise Obstacle("is divided inside of its input or output")
    if not tensors or not _has_tokens(tensors[0].shape, tokens):
        raise Obstacle("has an input without the rank's rows and positions")
    if not call.outputs:
        raise Obstacle("was not seen to end")


def _has_tokens(shape: Sequence[int], tokens: tuple[int, int]) -> bool:
    """Return whether a tensor is (rows, positions, ...) or (tokens, n)."""
    is_flat = len(shape) == 2 and shape[0] == tokens[0] * tokens[1]
    return is_flat or tuple(shape[:2]) == tokens


class _Nudge(nn.Module):
    """Multiplies the elements of float tensors by a number near 1, drawn for each of them."""

    def __init__(self, size: float, seed: int) -> None:
        super().__init__()
        self._size = size
        self._generator = torch.Generator().manual_seed(seed)

    def forward(self, value: Tensor) -> Tensor:
        signs = torch.randint(0, 2, value.shape, generator=self._generator).to(value.device) * 2.0 - 1.0
        return (value.to(torch.float64) * (1.0 + self._size * signs)).to(value.dtype)


class Widen(nn.Module):
    """Converts float tensors to float64."""

    def forward(self, value: Tensor) -> Tensor:
        """Return the value in float64."""
        return value.to(torch.float64)


Results = dict[tuple[str, str], Tensor]  # by end and slot


def run(
    module: nn.Module, call: ModuleCall, change: nn.Module, unit: float, *, of_parameters: bool = False
) -> tuple[Results, dict[str, Tensor]]:
    """Return the detached results of one device's module on changed inputs, with the rank's choices.

    The second value has the gradients of the parameters by their names in the module, on request. `unit` is
    the distance from 1.0 to the next number of the rank's precision.

    Raises: Obstacle.
    """

    def prepare(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return change(value).detach().requires_grad_()

    args, kwargs = _map(prepare, (tuple(call.args), dict(call.kwargs)))
    held = HeldSelections(call.selections, unit)
    with torch.enable_grad(), torch.random.fork_rng(devices=[]), held:
        outputs = dict(list_floats(module(*args, **kwargs)))
    found = {("output", slot): each.detach() for slot, each in outputs.items()}
    inputs = {slot: each for slot, each in list_floats((args, kwargs)) if slot in call.of_inputs}
    back = [(each, call.of_outputs[slot]) for slot, each in outputs.items() if slot in call.of_outputs]
    if any(isinstance(gradient, DTensor) or gradient.shape != each.shape for each, gradient in back):
        raise Obstacle("is divided inside of its input or output")
    named = {name: each for name, each in module.named_parameters() if of_parameters and each.requires_grad}
    if not back or not (inputs or named):
        return found, {}
    back = _leave_out_inner(back)
    gradients = _differentiate(back, [*inputs.values(), *named.values()])
    for slot, gradient in zip(inputs, gradients, strict=False):
        if gradient is not None:
            found["gradient of its input", slot] = gradient.detach()
    own = zip(named, gradients[len(inputs) :], strict=True)
    return found, {name: gradient for name, gradient in own if gradient is not None}


Back = list[tuple[Tensor, Tensor]]  # outputs, and their gradients


def _leave_out_inner(back: Back) -> Back:
    """Return the gradients that come from outside of the module.

    An output may be a value that the module computes with, such as the scores of its choices. The gradient of
    such an output includes contributions of the later outputs, which the replay computes itself.
    """
    later: Back = []
    # torch numbers operations in the order of their calls; an input that is returned has no operation
    for output, gradient in sorted(back, key=lambda each: -_number(each[0])):
        total = gradient.to(output.dtype)
        inner = _differentiate(later, [output], retain_graph=True)[0] if later else None
        later.append((output, total if inner is None else total - inner))
    return later


def _number(output: Tensor) -> int:
    return -1 if output.grad_fn is None else int(output.grad_fn._sequence_nr())


def _differentiate(back: Back, sources: Sequence[Tensor], **options: bool) -> Sequence[Tensor | None]:
    outputs, gradients = zip(*back, strict=True)
    found: Sequence[Tensor | None] = torch.autograd.grad(
        outputs, sources, gradients, allow_unused=True, **options
    )
    return found


def _compare(
    actual: Tensor, alike: Sequence[Tensor], exact: Tensor, tokens: tuple[int, int]
) -> tuple[float, float] | None:
    """Return the error of the rank and of one device, relative to the norm; None if choices flip in too many rows.

    A row has the values of one token. The rank may make the choice of any run of one device.
    """
    rows = tokens[0] * tokens[1]
    wide = exact.reshape(rows, -1)
    near = [each.to(torch.float64).reshape(rows, -1) for each in alike]
    own = actual.to(torch.float64).reshape(rows, -1)
    rounding = torch.stack([(each - wide).norm(dim=1) for each in near]).amax(dim=0)
    error = torch.stack([(own - each).norm(dim=1) for each in (wide, *near)]).amin(dim=0)
    sizes = wide.norm(dim=1)
    stable = rounding <= _STABLE * rounding.median()
    norm = float(sizes[stable].norm())
    if int(stable.sum()) < _LEAST_STABLE * rows or norm == 0.0:
        return None
    relative = float(rounding[stable].norm()) / norm
    return None if relative > MOST_ROUNDING else (float(error[stable].norm()) / norm, relative)
