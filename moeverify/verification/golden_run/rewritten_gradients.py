"""Noise of gradients that a user's step rewrites before the optimizer, such as the signs of Lion and Muon.

A sign, or a gradient divided by its own size, is a choice: an element whose gradient is smaller than its noise
may have either sign. The few calibration runs show that for some tensors and not for others of the same kind. So
the elements that may turn are found from the gradients before they are rewritten, and tensors of one shape share
the largest noise among them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from moeverify.parallel.regions.region import Region
from moeverify.results.checks import Kind
from moeverify.train.program import TrainingProgram
from moeverify.verification.checks.base import Watch
from moeverify.verification.golden.noise import noise_key
from moeverify.verification.golden_run.update_noise import MAX_SIGN_FLIPS, PUSH

# Largest difference from a cosine of 1 that a factor and the rounding to bfloat16 (2**-9 an element) leave.
_ROUNDING = 2.0**-12


class RewrittenGradients(Watch[frozenset[str]]):
    """Reports the parameters whose gradient is no multiple of the sum of the backward passes.

    For a program on one device. A clip multiplies all gradients by one number, and is no such change. `kept` has the
    gradient before and after the change, by step and name.
    """

    def __init__(self, program: TrainingProgram) -> None:
        self._sums: dict[str, Tensor] = {}
        self.kept: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        self._hooks: list[RemovableHandle] = []
        for shard in program.shards:
            if shard.tensor.requires_grad and shard.tensor.is_leaf:
                self._hooks.append(self._listen(shard.name, shard.tensor))

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Compare a gradient at the optimizer's step with the sum of the backward passes; see `Watch`."""
        total = self._sums.pop(name, None) if kind == Kind.GRADIENT else None
        if total is None or local is None or total.numel() != local.numel():
            return
        first, second = total.reshape(-1).double(), local.detach().reshape(-1).double()
        cosine = torch.nn.functional.cosine_similarity(first, second, dim=0)
        if first.any() and second.any() and abs(float(cosine)) < 1.0 - _ROUNDING:
            self.kept[step, name] = (first, second)

    def close(self) -> None:
        """Remove the hooks; see `Watch`."""
        for hook in self._hooks:
            hook.remove()
        self._sums.clear()

    def report(self) -> frozenset[str]:
        """Return the names of the parameters; see `Watch`."""
        return frozenset(name for _, name in self.kept)

    def _listen(self, name: str, tensor: Tensor) -> RemovableHandle:
        def keep(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self._sums[name] = parameter.grad.detach().clone()

        handle: RemovableHandle = tensor.register_post_accumulate_grad_hook(keep)  # type: ignore[no-untyped-call]
        return handle


def list_turns(runs: Sequence[RewrittenGradients]) -> dict[tuple[int, str], float]:
    """Return the noise of rewritten gradients, by step and name, if elements near zero turn their sign.

    An element may turn if it is smaller than PUSH times its difference between the first run and another one, or
    than the root mean square of these. As in `update_noise`, of many that may turn only some are not seen in a run.
    """
    found: dict[tuple[int, str], float] = {}
    for key, (before, after) in runs[0].kept.items() if runs else ():
        others = [run.kept[key][0] for run in runs[1:] if key in run.kept]
        if others:
            off = torch.stack([(each - before).abs() for each in others]).amax(dim=0)
            may_turn = before.abs() <= PUSH * off.clamp(min=float(off.square().mean().sqrt()))
            may_turn &= (before != 0) | (off > 0)  # zeros of unused rows stay zeros
            turned = after[may_turn].abs().sort(descending=True).values[:MAX_SIGN_FLIPS]
            found[key] = 2.0 * float(turned.norm() / after.norm()) / PUSH
    return found


def share_noise(
    noise: Mapping[str, float],
    names_by_kind: Mapping[Kind, Collection[str]],
    shapes: Mapping[str, tuple[int, ...]],
    num_steps: int,
    *,
    forced: bool = False,
) -> dict[str, float]:
    """Return the noise of the tensors of each kind: the largest of those of one shape and step.

    `shapes` are those of all parameters. Tensors without a noise of their own get none.
    """
    shared: dict[str, float] = {}
    for step in range(num_steps):
        for kind, names in names_by_kind.items():
            keys = {name: noise_key(step, kind, name, forced=forced) for name in names}
            known = {name: noise[key] for name, key in keys.items() if key in noise}
            largest: dict[tuple[int, ...], float] = {}
            for name, error in known.items():
                largest[shapes[name]] = max(largest.get(shapes[name], 0.0), error)
            shared |= {keys[name]: largest[shapes[name]] for name in known}
    return shared
