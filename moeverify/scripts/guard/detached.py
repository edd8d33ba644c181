"""Detection of optimizer parameters that never get a gradient although their module is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn
from torch.optim import Optimizer

from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.results.finding import Finding, make_finding
from moeverify.results.place import UserCall
from moeverify.results.script import MemberFacts, ScriptCheck
from moeverify.scripts.record.sites import USED

_TIMES = 3  # sampled steps


class DetachedParts:
    """The parameters that have got a gradient, and the number of sampled steps of each optimizer."""

    def __init__(self) -> None:
        self._trained: set[int] = set()
        self._num_steps: dict[int, int] = {}

    def see_gradients(self, shards: Sequence[LocalShard]) -> None:
        """Add the parameters that have a gradient: a script may drop it before the step to freeze a layer."""
        self._trained |= {id(shard.tensor) for shard in shards if shard.tensor.grad is not None}

    def find(
        self,
        optimizer: Optimizer,
        shards: Sequence[LocalShard],
        owners: Sequence[nn.Module],
        uses: Mapping[int, str],
        place: tuple[int, int],
    ) -> list[Finding]:
        """Return a finding at an optimizer's third sampled step if a part of the model is not trained.

        `shards` belong to the optimizer, `uses` has the call sites of modules by id, and `place` is the step
        and the rank. Parameters that share a module with trained ones may have no use in these batches.
        """
        own = {id(shard.tensor): shard.name for shard in shards if shard.tensor.requires_grad}
        got = {id(shard.tensor) for shard in shards if shard.tensor.grad is not None}
        self.see_gradients(shards)
        self._num_steps[id(optimizer)] = number = self._num_steps.get(id(optimizer), 0) + 1
        if number != _TIMES or 2 * len(got) < len(own):
            return []
        found: dict[str, str] = {}
        for module in (each for owner in owners for each in owner.modules() if id(each) in uses):
            inner = [id(each) for each in module.parameters() if id(each) in own]
            if not self._trained.intersection(inner):
                found |= {own[each]: uses[id(module)] for each in inner if own[each] not in found}
        if not found:
            return []
        step, rank = place
        names = list(found)
        sites = tuple(UserCall(name=USED, site=site) for site in (found[names[0]],) if site)
        facts, error = MemberFacts(which="detached", others=tuple(names[1:])), float(len(names))
        check = ScriptCheck.PARAMETERS
        return [make_finding(check, names[0], step, (rank,), facts, error=error, sites=sites)]
