"""Random numbers of a forward pass that has the rows of several passes of ranks: each part has its own states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

States = dict[str, Tensor]  # of the generators, by type of device


class MixedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """A mode in which random operators draw the rows of each part from the generators of that part.

    `sizes` has the number of rows of each part and `states` its generators; rows are in dim 0. `has_others`
    is whether an operator drew numbers that have other rows: these do not match those of the ranks.
    """

    def __init__(self, sizes: Sequence[int], states: Sequence[States]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_others = False
        self._sizes = sizes
        self._states = states

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; see `TorchDispatchMode`."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        whole = read_states()
        parts: list[Any] = []
        start = 0
        for size, states in zip(self._sizes, self._states, strict=True):
            own = _take((args, kwargs), start, size, sum(self._sizes))
            if own is None:
                self.has_others = True
                return func(*args, **kwargs)
            set_states(states)
            parts.append(func(*own[0], **own[1]))
            states.update(read_states())
            start += size
        set_states(whole)
        if func._schema.is_mutable:
            return args[0]
        if isinstance(parts[0], Tensor):
            return torch.cat(parts)
        return type(parts[0])(torch.cat(each) for each in zip(*parts, strict=True))


def _take(values: Any, start: int, size: int, total: int) -> Any:
    """Return the arguments of a part of the rows, or None if no argument has rows.

    In-place operators get views, so they write to the whole tensor.
    """
    num_taken = 0

    def take(value: Any) -> Any:
        nonlocal num_taken
        if isinstance(value, Tensor) and value.ndim and len(value) == total:
            num_taken += 1
            return value.narrow(0, start, size)
        return value

    def take_size(value: Any) -> Any:
        nonlocal num_taken
        if isinstance(value, list) and value and type(value[0]) is int and value[0] == total:
            num_taken += 1
            return [size, *value[1:]]
        return tree_map(take, value)

    args, kwargs = values
    taken = [take_size(each) for each in args], {name: take_size(each) for name, each in kwargs.items()}
    return taken if num_taken else None


def read_states() -> States:
    """Return the states of torch's generators, that of an accelerator only if it is in use."""
    states = {"cpu": torch.get_rng_state()}
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        module = torch.get_device_module(device)
        if device is not None and getattr(module, "is_initialized", lambda: True)():
            states[device.type] = module.get_rng_state()
    return states


def set_states(states: Mapping[str, Tensor]) -> None:
    """Set the states of torch's generators, of those devices that are there."""
    for device, state in states.items():
        if device == "cpu":
            torch.set_rng_state(state.clone())
        elif torch.get_device_module(device).is_available():
            torch.get_device_module(device).set_rng_state(state.clone())


__all__ = ["MixedDraws", "States", "read_states", "set_states"]
