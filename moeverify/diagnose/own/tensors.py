"""Mistakes in whole tensors: the parameters and buffers of a user's module, and what it is called with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moeverify.diagnose.own.replay import Candidate, Stage
from moeverify.results.own_module import Mistake, Part

Path = tuple[Any, ...]
Transform = Callable[[Tensor, float], Tensor]
_MOST_ROWS = 64  # of a parameter, such as a stack of experts, that are looked at one by one
_MOST_SIBLINGS = 8


def list_transforms(tensor: Tensor, sizes: Sequence[int]) -> Iterator[tuple[str, float | None, Transform]]:
    """Yield ways in which a tensor may be otherwise, by name and number, and how; those with None are fitted."""
    if tensor.dtype == torch.bool:
        yield "inverted", 0.0, lambda x, _: ~x
        yield "all-true", 0.0, lambda x, _: torch.ones_like(x)
    elif tensor.is_floating_point():
        yield "zero", 0.0, lambda x, _: torch.zeros_like(x)
        if tensor.numel() == 1:
            yield "one", 0.0, lambda x, _: torch.ones_like(x)
        yield "bfloat16", 0.0, lambda x, _: x.to(torch.bfloat16).to(x.dtype)
    else:
        for offset in (1, -1):
            yield "offset", offset, lambda x, n: (x + int(n)).clamp(min=0)
        for dim, length in enumerate(tensor.shape):
            for shift in (1, -1) if length > 1 else ():
                yield f"shifted:{dim}", shift, partial(_shift, dim)
    for dim, length in enumerate(tensor.shape):
        if length > 1:
            yield from _list_moves(dim, length, sizes)
    if tensor.ndim >= 2 and tensor.shape[-1] == tensor.shape[-2] > 1:
        yield "transposed", 0.0, lambda x, _: x.transpose(-1, -2).contiguous()


def _list_moves(dim: int, length: int, sizes: Sequence[int]) -> Iterator[tuple[str, float | None, Transform]]:
    shifts = dict.fromkeys((1, -1, *(length // size for size in sizes if size and length % size == 0)))
    for shift in shifts:
        if shift % length:
            yield f"moved:{dim}", shift, lambda x, n: x.roll(int(n), dim)
    for size in dict.fromkeys((2, *sizes)):
        if 1 < size < length and length % size == 0:
            yield f"restarted:{dim}", length // size, partial(_restart, dim)
    if length > 2:
        yield f"reversed:{dim}", 0.0, lambda x, _: x.flip(dim)


def _shift(dim: int, x: Tensor, number: float) -> Tensor:
    """Return a tensor moved along a dim; behind it is its least value, such as that of targets that do not count."""
    moved = x.roll(int(number), dim)
    at = 0 if number > 0 else x.shape[dim] - 1
    moved.select(dim, at).fill_(int(x.min()) if int(x.min()) < 0 else 0)
    return moved


def _restart(dim: int, x: Tensor, number: float) -> Tensor:
    """Return a tensor whose first so many slices along a dim stand there again and again."""
    first = x.narrow(dim, 0, int(number))
    return torch.cat([first] * (x.shape[dim] // int(number)), dim)


def list_parameter_mistakes(
    owners: Sequence[tuple[str, nn.Module]], old: Mapping[str, Tensor], root: nn.Module, sizes: Sequence[int]
) -> Iterator[Candidate]:
    """Yield other values of the parameters and buffers that modules have themselves, by the names of these."""
    siblings = _list_by_shape(root)
    for name, owner in owners:
        held = [*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)]
        for own, tensor in held:
            full = f"{name}.{own}" if name else own
            if full in old and not torch.equal(old[full], tensor.detach()):
                yield _make("parameter", own, "stale", name, tensor, 0.0, partial(_replace, old[full]))
            for way, number, transform in list_transforms(tensor.detach(), sizes):
                yield _make("parameter", own, way, name, tensor, number, transform)
            near = sorted(siblings.get(tuple(tensor.shape), ()), key=lambda each: not _is_near(each[0], full))
            for other, values in near[:_MOST_SIBLINGS]:
                if values is not tensor:
                    yield _make(
                        "parameter",
                        own,
                        "other",
                        name,
                        tensor,
                        0.0,
                        partial(_replace, values.detach().clone()),
                        other,
                    )
            if tensor.is_floating_point() and tensor.ndim == 1:
                yield _make("parameter", own, "hidden", name, tensor, 0.0, _hide)
            if tensor.is_floating_point():
                yield _make("parameter", own, "times", name, tensor, None, lambda x, c: x * c, start=1.0)
                if tensor.ndim == 1 and bool((tensor > 0).all()):
                    yield _make("parameter", own, "power", name, tensor, None, torch.pow, start=1.0)


def _hide(x: Tensor, _: float) -> Tensor:
    """Return what a softmax gives no weight, such as a sink that is left out."""
    return torch.full_like(x, torch.finfo(x.dtype).min / 2)


def list_expert_mistakes(owners: Sequence[tuple[str, nn.Module]]) -> Iterator[Candidate]:
    """Yield weights of one expert in the place of another's, of modules that hold those of all in stacks."""
    for name, owner in owners:
        held = [each for _, each in owner.named_parameters(recurse=False) if each.ndim >= 2]
        counts = {len(each) for each in held}
        if len(held) < 2 or len(counts) != 1 or not 1 < (count := counts.pop()) <= _MOST_ROWS:
            continue
        for shift in (1, -1):
            yield Candidate(_say_experts(name, "all", shift), partial(_roll_rows, held, shift))
        for shift in (1, -1):
            for at in range(count):
                mistake = _say_experts(name, "one", at, f"{(at + shift) % count}")
                yield Candidate(mistake, partial(_copy_row, held, at, (at + shift) % count))
        for at in range(count):
            yield Candidate(_say_experts(name, "zero", at), partial(_clear_row, held[-1:], at))


def _say_experts(module: str, way: str, number: int, after: str = "") -> Mistake:
    return Mistake(part="experts", name=module, way=way, module=module, number=number, after=after)


def _roll_rows(held: Sequence[Tensor], shift: int, stage: Stage, _: float) -> None:
    for tensor in held:
        stage.set_values(tensor, tensor.detach().roll(-shift, 0))


def _copy_row(held: Sequence[Tensor], at: int, source: int, stage: Stage, _: float) -> None:
    for tensor in held:
        values = tensor.detach().clone()
        values[at] = values[source]
        stage.set_values(tensor, values)


def _clear_row(held: Sequence[Tensor], at: int, stage: Stage, _: float) -> None:
    for tensor in held:
        values = tensor.detach().clone()
        values[at] = 0.0
        stage.set_values(tensor, values)


def _make(
    part: Part,
    own: str,
    way: str,
    module: str,
    tensor: Tensor,
    number: float | None,
    transform: Transform,
    after: str = "",
    start: float | None = None,
) -> Candidate:
    mistake = Mistake(part=part, name=own, way=way, module=module, number=number, after=after)

    def plant(stage: Stage, fitted: float) -> None:
        stage.set_values(tensor, transform(tensor.detach(), fitted if number is None else number))

    return Candidate(mistake, plant, start)


def _clone(values: Tensor, _: Tensor) -> Tensor:
    return values.detach().clone()


def _replace(values: Tensor, _: Tensor, __: float) -> Tensor:
    return values


def _list_by_shape(root: nn.Module) -> dict[tuple[int, ...], list[tuple[str, Tensor]]]:
    found: dict[tuple[int, ...], list[tuple[str, Tensor]]] = {}
    for name, parameter in root.named_parameters():
        found.setdefault(tuple(parameter.shape), []).append((name, parameter))
    return found


def _is_near(name: str, other: str) -> bool:
    """Return whether two parameters are of modules that stand beside each other."""
    return name.split(".")[:-2] == other.split(".")[:-2]


def list_input_mistakes(
    module: str, args: Sequence[Any], named: Mapping[str, Any], labels: Sequence[str], sizes: Sequence[int]
) -> Iterator[Candidate]:
    """Yield other values of what a module is called with; `labels` are the names of the arguments in order."""
    places: list[tuple[Path, str, Tensor]] = []
    for index, value in enumerate(args):
        label = labels[index] if index < len(labels) else f"argument {index}"
        places += _list_places((index,), label, value)
    for key, value in named.items():
        places += _list_places((key,), key, value)
    for path, label, tensor in places:
        if len(path) == 1:
            yield _change_input(module, path, label, "none", 0.0, lambda x, _: None)
        for way, number, transform in list_transforms(tensor, sizes):
            yield _change_input(module, path, label, way, number, transform)
        if tensor.ndim == 4:
            yield from _list_masks(module, path, label, tensor)
    for path, label, tensor in places:
        for _, other_label, other in places:
            if other is not tensor and other.shape == tensor.shape and other.dtype == tensor.dtype:
                yield _change_input(
                    module, path, label, "other", 0.0, partial(_replace, other.detach()), other_label
                )
    yield from _list_exchanged(module, places)
    for path, label, tensor in places:
        if tensor.is_floating_point():
            yield _change_input(module, path, label, "times", None, lambda x, c: x * c, start=1.0)


def _list_exchanged(module: str, places: Sequence[tuple[Path, str, Tensor]]) -> Iterator[Candidate]:
    """Yield pairs of tensors of one shape that a module is called with in each other's place."""
    for number, (path, label, tensor) in enumerate(places):
        for other_path, other_label, other in places[number + 1 :]:
            if other.shape == tensor.shape and other.dtype == tensor.dtype:
                mistake = Mistake(part="input", name=label, way="exchanged", module=module, after=other_label)
                yield Candidate(mistake, partial(_exchange_inputs, (path, tensor), (other_path, other)))


def _exchange_inputs(first: tuple[Path, Tensor], second: tuple[Path, Tensor], stage: Stage, _: float) -> None:
    for (path, _own), (_other, tensor) in ((first, second), (second, first)):
        holder: Any = stage.args if isinstance(path[0], int) else stage.named
        holder[path[0]] = _put(holder[path[0]], path[1:], partial(_clone, tensor))


def _list_places(path: tuple[Any, ...], label: str, value: Any) -> list[tuple[Path, str, Tensor]]:
    if isinstance(value, Tensor):
        return [(path, label, value)] if value.numel() else []
    if isinstance(value, list | tuple):
        return [
            each
            for index, item in enumerate(value)
            for each in _list_places((*path, index), f"{label}[{index}]", item)
        ]
    if isinstance(value, dict):
        return [
            each
            for key, item in value.items()
            for each in _list_places((*path, key), f"{label}[{key}]", item)
        ]
    return []


def _change_input(
    module: str,
    path: tuple[Any, ...],
    label: str,
    way: str,
    number: float | None,
    transform: Callable[[Tensor, float], Any],
    after: str = "",
    start: float | None = None,
) -> Candidate:
    mistake = Mistake(part="input", name=label, way=way, module=module, number=number, after=after)

    def plant(stage: Stage, fitted: float) -> None:
        holder: Any = stage.args if isinstance(path[0], int) else stage.named
        holder[path[0]] = _put(
            holder[path[0]], path[1:], lambda x: transform(x, fitted if number is None else number)
        )

    return Candidate(mistake, plant, start)


def _put(value: Any, path: tuple[Any, ...], change: Callable[[Tensor], Any]) -> Any:
    """Return a structure with one of its tensors changed."""
    if not path:
        return change(value)
    if isinstance(value, dict):
        value[path[0]] = _put(value[path[0]], path[1:], change)
        return value
    items = list(value)
    items[path[0]] = _put(items[path[0]], path[1:], change)
    return type(value)(items)


def _list_masks(module: str, path: tuple[Any, ...], label: str, mask: Tensor) -> Iterator[Candidate]:
    """Yield masks (rows, heads, queries, keys) that let queries see keys further back or ahead, or fewer of them."""
    for number in (1, 2, 3, -1, -2, -3):
        for way in ("reach", "short"):
            yield _change_input(module, path, label, way, number, partial(_shift_mask, way))


def _shift_mask(way: str, mask: Tensor, number: float) -> Tensor:
    """Return a mask that also shows the keys `number` before those that it shows, or only those both show."""
    hidden = False if mask.dtype == torch.bool else float(mask.min())
    moved = torch.full_like(mask, hidden)
    n, length = int(number), mask.shape[-1]
    if n > 0:
        moved[..., : length - n] = mask[..., n:]
    else:
        moved[..., -n:] = mask[..., : length + n]
    if mask.dtype == torch.bool:
        return mask | moved if way == "reach" else mask & moved
    return torch.maximum(mask, moved) if way == "reach" else torch.minimum(mask, moved)
