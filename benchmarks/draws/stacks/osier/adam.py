"""AdamW whose states are divided over the ranks of `batch` (ZeRO-1), on one flat buffer. It returns updates as
gradients for plain SGD, which has the learning rate and its schedule."""

from __future__ import annotations

import torch

from osier.dims import ParallelDims
from osier.ops import all_gather, all_reduce, reduce_scatter


def decays(name: str, parameter: torch.nn.Parameter) -> bool:
    """Return whether weight decay applies: not to norms, and not to the table."""
    return parameter.dim() > 1 and not name.startswith("embed.")


def rate(name: str, dims: ParallelDims) -> float:
    """Return the factor of the learning rate of a parameter."""
    if dims.has("osier-rate-name") and name.endswith("weight"):  # plant: osier-rate-name
        return 0.5
    if name.endswith("router.weight"):
        return 0.5
    return 2.0 if name.startswith(("embed.", "head.")) else 1.0


class ShardedAdam:
    def __init__(self, model: torch.nn.Module, dims: ParallelDims, betas=(0.9, 0.95), eps=1e-6, decay=0.5):
        self.named, self.dims = list(model.named_parameters()), dims
        self.betas, self.eps, self.decay, self.count = betas, eps, decay, 0
        self.numel = sum(p.numel() for _, p in self.named)
        self.block = -(-self.numel // dims.batch.size)
        like = self.named[0][1].detach()
        self.rates = self.own(self.flatten([torch.full_like(p, rate(n, dims)) for n, p in self.named]))
        masks = [torch.full_like(p, float(decays(n, p))) for n, p in self.named]
        if dims.has("osier-decay-flat"):
            masks = [
                torch.full_like(p, float(decays(n, p.view(-1)))) for n, p in self.named
            ]  # plant: osier-decay-flat
        self.decays = self.own(self.flatten(masks))
        if dims.has("osier-decay-block"):
            self.decays = self.flatten(masks)[0]  # plant: osier-decay-block
        self.master = self.own(self.flatten([p for _, p in self.named]))
        self.exp_avg = torch.zeros(self.block, dtype=like.dtype)
        self.exp_avg_sq = torch.zeros(self.block, dtype=like.dtype)

    def flatten(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return (ranks, block) with the values of all tensors, and zeros at the end."""
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        room = self.block * self.dims.batch.size
        return torch.cat([flat, flat.new_zeros(room - self.numel)]).view(self.dims.batch.size, self.block)

    def own(self, flat: torch.Tensor) -> torch.Tensor:
        if self.dims.has("osier-block-rank"):
            return flat[self.dims.cp.rank].clone()  # plant: osier-block-rank
        return flat[self.dims.batch.rank].clone()

    def reduced(self) -> torch.Tensor:
        """Return this rank's block of the summed gradients."""
        flat = self.flatten([p.grad for _, p in self.named])
        if self.dims.has("osier-same-reduce"):
            return self.own(all_reduce(flat, self.dims.batch))
        return self.own(flat) if self.dims.batch.alone else reduce_scatter(flat, self.dims.batch)

    @torch.no_grad()
    def prepare(self, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Put updates in the place of gradients. Returns their norm before the clip, and its coefficient."""
        grad = self.reduced()
        norm = all_reduce(grad.square().sum(), self.dims.batch).sqrt()
        coefficient = (limit / (norm + 1e-6)).clamp(max=1.0)
        clipped = grad * coefficient
        self.count += 1
        first, second = self.betas
        self.exp_avg.lerp_(clipped, 1 - first)
        if not self.dims.has("osier-moment-unclipped"):  # plant: osier-moment-unclipped
            grad = clipped
        self.exp_avg_sq.mul_(second).addcmul_(grad, grad, value=1 - second)
        mean = self.exp_avg / (1 - first**self.count)
        square = self.exp_avg_sq / (1 - second**self.count)
        if not self.dims.has("osier-master-stale"):  # plant: osier-master-stale
            self.master = self.own(self.flatten([p for _, p in self.named]))
        update = mean / (square.sqrt() + self.eps) + self.decay * self.decays * self.master
        self.hand_out(update * self.rates)
        return norm, coefficient

    def hand_out(self, update: torch.Tensor) -> None:
        """Give all ranks the whole update."""
        batch = self.dims.batch
        if self.dims.has("osier-wire-dtype"):
            update = update.to(torch.bfloat16).to(update.dtype)  # plant: osier-wire-dtype
        flat = update if batch.alone else all_gather(update, batch).view(-1)
        offset = 0
        for _, parameter in self.named:
            parameter.grad.copy_(flat[offset : offset + parameter.numel()].view_as(parameter))
            offset += parameter.numel()
