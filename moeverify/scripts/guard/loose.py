"""Detection of parameters that get gradients, but are in no called model and in no optimizer."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from moeverify.parallel.regions.local_shard import logical_name
from moeverify.parallel.regions.placement import local_part
from moeverify.results.finding import Finding, make_finding
from moeverify.results.place import UserCall
from moeverify.results.script import MemberFacts, ScriptCheck
from moeverify.scripts.guard.samples import measure_samples
from moeverify.scripts.record.model import WatchedModel, list_parts
from moeverify.scripts.record.sites import USED
from moeverify.scripts.record.variables import name_by_variables

_TIMES = 2  # sampled steps


class LooseParameters:
    """Samples of parameters outside of all models and optimizers, such as those in a list of a module.

    They count if their gradients change between two sampled steps, and their values do not.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._seen: dict[int, tuple[int, int]] = {}  # by id: hashes of value and gradient

    def find(self, model: WatchedModel, place: tuple[int, int]) -> list[Finding]:
        """Return a finding before an optimizer step, in the second of two; `place` is the step and the rank."""
        if self._num_steps == _TIMES:
            return []
        self._num_steps += 1
        shards = model.shards()
        # FSDP registers other parameters while it has gathered them.
        registered = (each for owner in model.owners for each in owner.parameters())
        found = list(_list_loose([*(shard.tensor for shard in shards), *registered]))
        values = measure_samples([local_part(each) for each in found], only_hashes=True).hashes
        gradients = [local_part(each.grad) for each in found if each.grad is not None]
        pairs = zip(values, measure_samples(gradients, only_hashes=True).hashes, strict=True)
        before, self._seen = self._seen, dict(zip(map(id, found), pairs, strict=True))
        forgotten = [each for each in found if _is_forgotten(before.get(id(each)), self._seen[id(each)])]
        # Other optimizers than those of torch have most of the parameters, or copies of them.
        if not forgotten or 2 * len(forgotten) > len(shards):
            return []
        held, others = _name_held(model, forgotten), name_by_variables(forgotten)
        # Sorted, as ranks list objects in other orders.
        named = sorted(held.get(id(each), (_name(each, others), "")) for each in forgotten)
        sites = tuple(UserCall(name=USED, site=site) for _, site in named[:1] if site)
        (first, *more), (step, rank) = [name for name, _ in named], place
        facts, error = MemberFacts(which="missing", others=tuple(more)), float(len(named))
        check = ScriptCheck.PARAMETERS
        return [make_finding(check, first, step, (rank,), facts, error=error, sites=sites)]


def _name(parameter: Tensor, names: Mapping[int, str]) -> str:
    return names.get(id(parameter), f"an unnamed parameter {tuple(parameter.shape)}")


def _is_forgotten(before: tuple[int, int] | None, now: tuple[int, int]) -> bool:
    """Return whether a value is as before and its gradient is not."""
    return before is not None and before[0] == now[0] and before[1] != now[1]


def _list_loose(parameters: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield parameters with gradients that have memory, but share none with `parameters` or an optimizer."""
    everything = gc.get_objects()
    optimizers = [each for each in everything if issubclass(type(each), Optimizer)]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    known = [*parameters, *(each for group in groups for each in group["params"])]
    memory = {0, *map(_find_memory, known)}  # 0 is freed memory
    kinds = (nn.Parameter, DTensor)
    leaves = [each for each in everything if type(each) in kinds and each.is_leaf and each.requires_grad]
    yield from (each for each in leaves if each.grad is not None and _find_memory(each) not in memory)


def _find_memory(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, or another number for a tensor class without one."""
    local = local_part(tensor)
    return local.untyped_storage().data_ptr() if type(local) in (Tensor, nn.Parameter) else -id(local)


def _name_held(model: WatchedModel, wanted: Sequence[Tensor]) -> dict[int, tuple[str, str]]:
    """Return names and call sites, by id, of parameters and modules in lists and dicts of the model's modules."""
    ids = {id(each) for each in wanted}
    found: dict[int, tuple[str, str]] = {}
    for path, module in (pair for owner in model.owners for pair in owner.named_modules()):
        for attribute, value in vars(module).items():
            parts = [] if attribute.startswith("_") else list_parts(value)
            for key, part in parts:
                name, kind = logical_name(f"{path}.{attribute}.{key}".lstrip(".")), type(part)
                inner = part.named_parameters(name) if issubclass(kind, nn.Module) else [(name, part)]
                site = model.uses.get(id(part if issubclass(kind, nn.Module) else module), "")
                found |= {id(each): (full, site) for full, each in inner if id(each) in ids}
    return found
