"""The options of an optimizer's parameter groups, as numbers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.optim import Optimizer

from moeverify.scripts.record.lines import Options
from moeverify.scripts.record.model import WatchedModel
from moeverify.train.calls.listener import to_float
from moeverify.train.calls.options import find_option_sites


def list_options(optimizer: Optimizer, model: WatchedModel, step: int) -> Iterator[Options]:
    """Yield the numeric options of each parameter group, with the lines that set them."""
    name = type(optimizer).__name__
    for number, group in enumerate(optimizer.param_groups):
        numbers = {key: to_float(value) for key, value in group.items() if _is_numeric(value)}
        for key, value in group.items():
            if isinstance(value, tuple) and all(map(_is_numeric, value)):
                numbers.update({f"{key}[{n}]": to_float(each) for n, each in enumerate(value)})
        names = tuple(shard.name for shard in model.shards_of(optimizer, number))
        own = {key.partition("[")[0] for key in numbers}  # a tuple has an entry for each number
        sites = {key: site for key, site in find_option_sites(group).items() if key in own}
        yield Options(step=step, optimizer=name, number=number, options=numbers, names=names, sites=sites)


def _is_numeric(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
