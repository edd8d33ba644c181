"""Location of the first NaN or infinity, by flags of module outputs that are read for a nonfinite loss."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from moeverify.parallel.regions.local_shard import logical_name
from moeverify.parallel.regions.placement import local_part
from moeverify.parallel.regions.unseen import unseen
from moeverify.scripts.record.outputs import find_tensor

_MOST_MODULES = 256
_MOST_FLAGS = 1 << 14
_MOST_READ = 256  # outputs of a sampled step that are compared between ranks


class FiniteWatch:
    """A recorder of one number per module call, which is nonfinite if the output is.

    In a sampled step it is the largest magnitude in the output. In other steps it is the sum of the first
    feature (of the last dim), which costs almost nothing. It suffices because the next matrix product makes
    all features of a bad token bad.
    """

    def __init__(self) -> None:
        self.is_sampled = False
        self.is_active = True
        self._flags: list[tuple[str, Tensor]] = []
        self._often: set[str] = set()
        self.values: list[float] = []  # losses of the step that were read
        self._losses: list[tuple[int, Tensor]] = []  # number of outputs before the loss, and the loss

    def watch(self, model: nn.Module) -> None:
        """Hook the modules with parameters of their own, or only the blocks if there are too many."""
        own = [
            (name, each)
            for name, each in model.named_modules()
            if next(each.parameters(recurse=False), None) is not None
        ]
        for name, module in own if len(own) <= _MOST_MODULES else _list_blocks(model):
            module.register_forward_hook(unseen(self._make_hook(logical_name(name))))

    def clear(self) -> None:
        """Begin the next step."""
        self._flags.clear()
        self._losses.clear()
        self.values.clear()

    def add_loss(self, loss: Tensor) -> None:
        """Store a loss, a single number, for `find_bad_loss`.

        Reading it at once would synchronize the host with the device in every micro-batch. The device would
        then wait for the host to launch the next one.
        """
        self._losses.append((self.num_calls, loss.detach().clone()))

    def find_bad_loss(self) -> int | None:
        """Return the number of outputs before the first nonfinite loss, or None; synchronizes.

        The losses move to `values`.
        """
        losses = [(before, float(loss)) for before, loss in self._losses]
        self._losses = []
        self.values += [loss for _, loss in losses]
        return next((before for before, loss in losses if not math.isfinite(loss)), None)

    def learn(self) -> None:
        """Ignore modules whose output is nonfinite in a good step from now on, such as attention masks."""
        self._often |= {name for _, name in self._list_bad()}

    def find(self) -> tuple[int, str] | None:
        """Return number and name of the step's first nonfinite output, or None; synchronizes."""
        return next(((number, name) for number, name in self._list_bad() if name not in self._often), None)

    def read(self) -> tuple[tuple[str, float], ...]:
        """Return names and largest magnitudes of the first outputs of a sampled step; synchronizes."""
        return tuple((name, value) for name, value in self._read(_MOST_READ) if math.isfinite(value))

    @property
    def num_calls(self) -> int:
        """Return the number of outputs that were checked in this step."""
        return len(self._flags)

    @property
    def num_losses(self) -> int:
        """Return the number of losses that were not read yet."""
        return len(self._losses)

    def _list_bad(self) -> Iterator[tuple[int, str]]:
        for number, (name, value) in enumerate(self._read(_MOST_FLAGS)):
            if not math.isfinite(value):
                yield number, name

    def _read(self, most: int) -> list[tuple[str, float]]:
        by_device: dict[torch.device, list[int]] = {}
        for number, (_, flag) in enumerate(self._flags[:most]):
            by_device.setdefault(flag.device, []).append(number)
        found: dict[int, float] = {}
        for numbers in by_device.values():
            values = torch.stack([self._flags[number][1] for number in numbers]).tolist()
            found.update(zip(numbers, values, strict=True))
        return [(self._flags[number][0], found[number]) for number in sorted(found)]

    def _make_hook(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            # A compiler would trace the flags as part of the model.
            if (
                not self.is_active
                or not torch.is_grad_enabled()
                or torch.compiler.is_compiling()
                or len(self._flags) >= _MOST_FLAGS
            ):
                return
            tensor = find_tensor(output)
            if tensor is None:
                return
            with torch.no_grad():
                local = local_part(tensor).detach()
                if not local.numel():
                    return
                if self.is_sampled:
                    flag = _find_largest(local)
                else:
                    flag = (local[..., 0] if local.ndim > 1 else local).sum(dtype=torch.float32)
            self._flags.append((name, flag))

        return hook


def _find_largest(values: Tensor) -> Tensor:
    """Return the largest absolute value, or NaN; twenty times as fast on a CPU as the infinite norm."""
    smallest, largest = torch.aminmax(torch.view_as_real(values) if values.is_complex() else values)
    return torch.maximum(largest, -smallest).float()


def _list_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children of module lists, dicts and sequences, which are the layers of nearly all models."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            yield from ((f"{name}.{key}".lstrip("."), child) for key, child in module.named_children())
