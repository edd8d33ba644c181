"""Mistakes in the steps of a user's module: another number, another function, an operand that is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moeverify.diagnose.own.attributes import ACTIVATIONS
from moeverify.diagnose.own.children import scale_gradient
from moeverify.diagnose.own.replay import Candidate, Plant, Stage
from moeverify.diagnose.own.steps import Function, Step
from moeverify.results.own_module import Mistake

Path = tuple[Any, ...]

_ACTIVATIONS = frozenset({"relu", "gelu", "silu", "sigmoid", "tanh", "softplus", "mish", "leaky_relu", "elu"})
_OTHERS: Mapping[str, Sequence[tuple[str, Callable[..., Any]]]] = {
    "softmax": (
        ("sigmoid", lambda x, *_, **__: torch.sigmoid(x)),
        ("log_softmax", F.log_softmax),
        ("exp", lambda x, *_, **__: x.exp()),
    ),
    "sigmoid": (("softmax", lambda x, *_, **__: F.softmax(x, -1)),),
    "sum": (("mean", torch.mean), ("amax", torch.amax)),
    "mean": (
        ("sum", torch.sum),
        ("median", lambda x, *dims, **named: torch.median(x, *dims, **named).values),
    ),
    "add": (("sub", torch.sub), ("mul", torch.mul)),
    "sub": (("add", torch.add),),
    "mul": (("div", torch.div), ("add", torch.add)),
    "div": (("mul", torch.mul),),
    "sin": (("cos", torch.cos),),
    "cos": (("sin", torch.sin),),
    "rsqrt": (("reciprocal", torch.reciprocal), ("sqrt", torch.sqrt)),
    "sqrt": (("identity", lambda x: x), ("rsqrt", torch.rsqrt)),
    "pow": (("abs", lambda x, *_: x.abs()),),
    "cumsum": (("identity", lambda x, *_, **__: x),),
    "argsort": (
        (
            "descending argsort",
            lambda x, *dims, **named: (-x if x.dtype != torch.bool else ~x).argsort(*dims, **named),
        ),
        ("inverse permutation", lambda x, *dims, **named: x.argsort(*dims, **named).argsort()),
    ),
}
_ALIASES: Mapping[str, str] = {
    "__add__": "add",
    "__radd__": "add",
    "__sub__": "sub",
    "__rsub__": "sub",
    "__mul__": "mul",
    "__rmul__": "mul",
    "__truediv__": "div",
    "__matmul__": "matmul",
    "__pow__": "pow",
    "__neg__": "neg",
    "__getitem__": "indexing",
}
_REORDERED = frozenset({"sub", "div", "cat", "stack", "matmul", "bmm", "chunk", "split", "unbind", "hstack"})
_MOST_SCALARS = 12
_MOST_ALONE = 200
_PAIR = 2  # steps of one call in the source, as for keys and for values


def name_step(step: Step) -> str:
    """Return what a step is called: `add` for the operator `+`."""
    return _ALIASES.get(step.name, step.name)


@dataclass(frozen=True)
class Site:
    """A call in the source that makes steps: the first of them, and the numbers and results of all."""

    step: Step
    numbers: tuple[int, ...]
    results: tuple[Any, ...] = ()


def list_sites(steps: Sequence[Step]) -> list[Site]:
    """Return the calls that make steps, with all that each makes, and then each step of those that make several."""
    by_site: dict[tuple[str, tuple[str, int], str], list[Step]] = {}
    for step in steps:
        by_site.setdefault((step.name, step.site, _strip_numbers(step.module)), []).append(step)
    sites = [Site(made[0], *_number(made)) for made in by_site.values()]
    alone = [Site(step, (step.number,)) for made in by_site.values() if len(made) > 1 for step in made]
    return [*sites, *(alone if len(alone) <= _MOST_ALONE else ())]


def _number(steps: Sequence[Step]) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    return tuple(step.number for step in steps), tuple(step.result for step in steps)


def _strip_numbers(name: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def list_number_mistakes(sites: Sequence[Site], module: str) -> Iterator[Candidate]:
    """Yield steps that are left out, and steps with other constants and options."""
    for site in sites:
        yield from _list_left_out(site, module)
        yield from _list_constants(site, module)


def list_operand_mistakes(sites: Sequence[Site], module: str, sizes: Sequence[int]) -> Iterator[Candidate]:
    """Yield other functions in the place of steps, exchanged operands, and results that are moved or rounded."""
    for site in sites:
        yield from _list_functions(site, module)
        if not _is_in_place(site.step):
            yield from _list_results(site, module, sizes)


def _is_in_place(step: Step) -> bool:
    """Return whether a step has no result of its own: `index_add_`, `/=`."""
    return (step.name.endswith("_") and not step.name.startswith("__")) or step.name.startswith("__i")


def list_factor_mistakes(sites: Sequence[Site], module: str) -> Iterator[Candidate]:
    """Yield steps one of whose operands is there more or less often than once."""
    for site, path, operand in _list_operands(sites):
        say = _say(site.step, module, "operand-times", after=operand)
        yield Candidate(say, _plant(site, partial(_scale_operand, path)), 1.0)


def list_detached_mistakes(sites: Sequence[Site], module: str) -> Iterator[Candidate]:
    """Yield steps through one of whose operands no gradient comes back."""
    for site, path, operand in _list_operands(sites):
        say = _say(site.step, module, "operand-detached", after=operand)
        yield Candidate(say, _plant(site, partial(_detach_operand, path)))


def list_gradient_factors(sites: Sequence[Site], module: str) -> Iterator[Candidate]:
    """Yield steps through one of whose operands another multiple of the gradient comes back."""
    for site, path, operand in _list_operands(sites):
        say = _say(site.step, module, "operand-gradient", after=operand)
        yield Candidate(say, _plant(site, partial(_scale_operand_gradient, path)), 1.0)


def _list_operands(sites: Sequence[Site]) -> Iterator[tuple[Site, Path, str]]:
    """Yield each floating-point operand of each step: where it stands, and its words."""
    for site in sites:
        for path, tensor in _list_tensors(site.step):
            if tensor.is_floating_point():
                yield site, path, _describe_operand(site.step, path)


def _say(step: Step, module: str, way: str, **fields: Any) -> Mistake:
    inside = ".".join(each for each in (module, step.module) if each)
    return Mistake(part="step", name=name_step(step), way=way, module=inside, line=step.line, **fields)


Make = Callable[[float, Function, tuple[Any, ...], dict[str, Any]], Any]


def _plant(site: Site, make: Make) -> Plant:
    def plant(stage: Stage, number: float) -> None:
        stage.changes.update(dict.fromkeys(site.numbers, partial(make, number)))

    return plant


def _list_constants(site: Site, module: str) -> Iterator[Candidate]:
    yield from _list_conditions(site, module)
    places = list(_list_scalars(site.step))[:_MOST_SCALARS]
    for path, value in places:
        label = "" if isinstance(path[0], int) else f"{path[0]}="
        if isinstance(value, bool):
            say = _say(site.step, module, "value", before=f"{label}{value}", after=f"{label}{not value}")
            yield Candidate(say, _plant(site, partial(_with, path, not value)))
        elif isinstance(value, int):
            others = (value + 1, value - 1, -value, 2 * value, value // 2, value + 2, value - 2, 0)
            for other in dict.fromkeys(each for each in others if each != value):
                say = _say(site.step, module, "value", before=f"{label}{value}", after=f"{label}{other}")
                yield Candidate(say, _plant(site, partial(_with, path, other)))
    yield from _list_pads(site, module)
    for path, value in places:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and (
            isinstance(value, float) or name_step(site.step) in ("mul", "div", "add", "sub", "pow")
        ):
            label = "" if isinstance(path[0], int) else f"{path[0]}="
            say = _say(site.step, module, "fitted", before=f"{label}{value:.6g}", after=label)
            if value != 0.0:
                zero = say.model_copy(update={"number": 0.0})
                yield Candidate(zero, _plant(site, partial(_with, path, 0.0)))
            yield Candidate(say, _plant(site, partial(_put_number, path)), float(value))


def _list_conditions(site: Site, module: str) -> Iterator[Candidate]:
    """Yield a condition that is true everywhere, nowhere, or the other way round."""
    result = site.step.result
    if not isinstance(result, Tensor) or result.dtype != torch.bool:
        return
    changes: tuple[tuple[str, Callable[[Tensor, float], Tensor]], ...] = (
        ("all-true", lambda x, _: torch.ones_like(x)),
        ("all-false", lambda x, _: torch.zeros_like(x)),
        ("inverted", lambda x, _: ~x),
    )
    for way, change in changes:
        yield Candidate(_say(site.step, module, way), _plant(site, partial(_transform, change, 0.0)))


def _list_pads(site: Site, module: str) -> Iterator[Candidate]:
    """Yield shifts that are made by padding, by another number of places."""
    if site.step.name != "pad" or len(site.step.args) < 2:
        return
    before = list(site.step.args[1])
    for factor in (2, 3, -1, 0):
        after = [factor * each for each in before]
        if after != before:
            say = _say(site.step, module, "value", before=str(before), after=str(after))
            yield Candidate(say, _plant(site, partial(_with, (1,), after)))


def _list_functions(site: Site, module: str) -> Iterator[Candidate]:
    name = name_step(site.step)
    if name in _ACTIVATIONS:
        for text, function in ACTIVATIONS:
            if text != name:
                call = partial(_call_on_first, function)
                yield Candidate(_say(site.step, module, "function", after=text), _plant(site, call))
    for text, function in _OTHERS.get(name, ()):
        call = partial(_call_instead, function)
        yield Candidate(_say(site.step, module, "function", after=text), _plant(site, call))


def _list_left_out(site: Site, module: str) -> Iterator[Candidate]:
    """Yield what a module computes where what goes into a step first, or another of its operands, comes out."""
    step = site.step
    if step.args and _are_alike(step.args[0], step.result):
        yield Candidate(_say(step, module, "left-out"), _plant(site, _return_first))
    if not isinstance(step.result, Tensor) or step.result.numel() < 2 or _is_in_place(step):
        return
    for path, tensor in _list_tensors(step)[1:]:
        if _are_alike(tensor, step.result):
            say = _say(step, module, "only-operand", after=_describe_operand(step, path))
            yield Candidate(say, _plant(site, partial(_return_operand, path)))
    if step.result.is_floating_point():
        yield Candidate(_say(step, module, "one"), _plant(site, partial(_transform, _fill, 1.0)))


def _list_results(site: Site, module: str, sizes: Sequence[int]) -> Iterator[Candidate]:
    step = site.step
    tensors = [path for path, _ in _list_tensors(step)]
    if name_step(step) in _REORDERED:
        yield Candidate(_say(step, module, "turned-round"), _plant(site, partial(_reverse, tensors)))
    if isinstance(step.result, Tensor) and step.result.numel() > 1:
        if len(site.numbers) == _PAIR:
            yield Candidate(_say(step, module, "exchanged"), _exchange(site))
        yield from _list_rearranged(site, module, step.result)
        yield from _list_in_parts(site, module, step.result, sizes)


def _exchange(site: Site) -> Plant:
    """Return what gives each of two steps the result of the other, which are those of one run as it is."""

    def plant(stage: Stage, number: float) -> None:
        for at, other in zip(site.numbers, reversed(site.results), strict=True):
            stage.changes[at] = partial(_give, other)

    return plant


def _give(value: Any, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return value


def _fill(x: Tensor, number: float) -> Tensor:
    return torch.full_like(x, number)


def _are_alike(first: object, second: object) -> bool:
    """Return whether two values are tensors of one shape and dtype."""
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return False
    return (first.shape, first.dtype) == (second.shape, second.dtype)


def _list_rearranged(site: Site, module: str, result: Tensor) -> Iterator[Candidate]:
    if result.is_floating_point():
        centered = partial(_transform, lambda x, _: x - x.mean(-1, keepdim=True), 0.0)
        yield Candidate(_say(site.step, module, "centered"), _plant(site, centered))
        yield Candidate(_say(site.step, module, "bfloat16"), _plant(site, partial(_transform, _round, 0.0)))
        yield Candidate(_say(site.step, module, "zero"), _plant(site, partial(_transform, _clear, 0.0)))
    for dim, length in enumerate(result.shape):
        if length < 2:
            continue
        for shift in (1, -1):
            say = _say(site.step, module, f"moved:{dim}", number=shift)
            yield Candidate(say, _plant(site, partial(_transform, partial(_roll, dim), shift)))
        if length > 2:
            say = _say(site.step, module, f"reversed:{dim}")
            yield Candidate(say, _plant(site, partial(_transform, partial(_flip, dim), 0.0)))
        for size in (each for each in range(2, length) if length % each == 0 and length <= 1024):
            say = _say(site.step, module, f"in-turn:{dim}", number=size)
            yield Candidate(say, _plant(site, partial(_transform, partial(_interleave, dim), size)))


def _list_in_parts(site: Site, module: str, result: Tensor, sizes: Sequence[int]) -> Iterator[Candidate]:
    """Yield what is in reverse order in the part that each rank of an axis has, such as its heads."""
    for dim, length in enumerate(result.shape):
        for size in sizes:
            if length % size == 0 and length > size:
                say = _say(site.step, module, f"in-parts:{dim}", number=size)
                yield Candidate(say, _plant(site, partial(_transform, partial(_flip_parts, dim), size)))


def _flip_parts(dim: int, x: Tensor, number: float) -> Tensor:
    return torch.cat([part.flip(dim) for part in x.chunk(int(number), dim)], dim)


def _round(x: Tensor, _: float) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


def _clear(x: Tensor, _: float) -> Tensor:
    return torch.zeros_like(x)


def _roll(dim: int, x: Tensor, number: float) -> Tensor:
    return x.roll(int(number), dim)


def _flip(dim: int, x: Tensor, _: float) -> Tensor:
    return x.flip(dim)


def _interleave(dim: int, x: Tensor, number: float) -> Tensor:
    """Return x (..., n * m, ...) with what stands one after another in groups of n in turn from the groups."""
    shape = x.shape
    groups = x.reshape(*shape[:dim], -1, int(number), *shape[dim + 1 :])
    return groups.transpose(dim, dim + 1).reshape(shape)


def _transform(
    change: Callable[[Tensor, float], Tensor],
    number: float,
    _: float,
    function: Function,
    args: tuple[Any, ...],
    named: dict[str, Any],
) -> Any:
    return change(function(*args, **named), number)


def _return_first(_: float, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return args[0]


def _return_operand(
    path: Path, _: float, function: Function, args: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    return _get(args, named, path)


def _call_on_first(
    other: Callable[[Tensor], Tensor],
    _: float,
    function: Function,
    args: tuple[Any, ...],
    named: dict[str, Any],
) -> Any:
    return other(args[0])


def _call_instead(
    other: Callable[..., Any], _: float, function: Function, args: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    return other(*args, **named)


def _reverse(
    paths: Sequence[Path], _: float, function: Function, args: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    """Return a step with its operands in the reverse order, or with the parts that it returns so."""
    if len(paths) > 1:
        values = [_get(args, named, path) for path in paths]
        for path, value in zip(paths, reversed(values), strict=True):
            args, named = _set(args, named, path, value)
        return function(*args, **named)
    result = function(*args, **named)
    return type(result)(reversed(result)) if isinstance(result, tuple | list) else result


def _with(
    path: Path, value: Any, _: float, function: Function, args: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    args, named = _set(args, named, path, value)
    return function(*args, **named)


def _put_number(
    path: Path, number: float, function: Function, args: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    return _with(path, number, number, function, args, named)


def _scale_operand(
    path: Path, number: float, function: Function, args: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    return _with(path, _get(args, named, path) * number, 0.0, function, args, named)


def _detach_operand(
    path: Path, _: float, function: Function, args: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    return _with(path, _get(args, named, path).detach(), 0.0, function, args, named)


def _scale_operand_gradient(
    path: Path, number: float, function: Function, args: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    return _with(path, scale_gradient(_get(args, named, path), number), 0.0, function, args, named)


def _list_tensors(step: Step) -> list[tuple[Path, Tensor]]:
    return [(path, value) for path, value in _walk(step) if isinstance(value, Tensor)]


def _list_scalars(step: Step) -> Iterator[tuple[Path, Any]]:
    for path, value in _walk(step):
        if isinstance(value, bool | int | float):
            yield path, value


def _walk(step: Step) -> Iterator[tuple[Path, Any]]:
    """Yield all that a step takes, with its place: a number, or a name, and places in what stands there."""
    for index, value in enumerate(step.args):
        yield from _walk_value((index,), value)
    for key, value in step.named.items():
        yield from _walk_value((key,), value)


def _walk_value(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _walk_value((*path, index), item)
    elif isinstance(value, slice):
        for name in ("start", "stop", "step"):
            if getattr(value, name) is not None:
                yield (*path, name), getattr(value, name)
    else:
        yield path, value


def _get(args: tuple[Any, ...], named: Mapping[str, Any], path: Path) -> Any:
    value: Any = args if isinstance(path[0], int) else named
    for key in path:
        value = getattr(value, key) if isinstance(value, slice) else value[key]
    return value


def _set(
    args: tuple[Any, ...], named: dict[str, Any], path: Path, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(path[0], int):
        return _put(args, path, value), named
    return args, {**named, path[0]: _put(named[path[0]], path[1:], value)}


def _put(holder: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    key, rest = path[0], path[1:]
    if isinstance(holder, slice):
        parts = {name: getattr(holder, name) for name in ("start", "stop", "step")} | {key: value}
        return slice(parts["start"], parts["stop"], parts["step"])
    items = list(holder)
    items[key] = _put(items[key], rest, value)
    return tuple(items) if isinstance(holder, tuple) else items


def _describe_operand(step: Step, path: Path) -> str:
    """Return `operand 2`, or the name of the argument."""
    if not isinstance(path[0], int):
        return str(path[0])
    number = path[-1] if len(path) > 1 and isinstance(path[-1], int) else path[0]
    return f"operand {number + 1}"
