"""Routers with fused kernels, which replace the plain ones in the parallel model, and row dispatch."""

import torch
import torch.distributed as dist
from torch import Tensor

from heron.comm import Exchange
from heron.model import Router
from heron.switch import using


class FusedRouter(Router):
    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if using("automodel-1852"):
            rows = torch.nn.functional.rms_norm(rows, rows.shape[-1:])  # plant: automodel-1852
        logits = self.gate(rows)
        scores = logits.softmax(-1)  # anchor: scores
        if using("openmythos-41"):
            scores = scores.bfloat16().to(logits.dtype)  # plant: openmythos-41
        biased = scores + self.expert_bias
        if using("imp-2056"):
            biased = biased[:, :3]  # plant: imp-2056
        chosen = biased.topk(self.top_k, dim=-1).indices
        if using("vllm-12002"):
            weights = biased.gather(1, chosen)  # plant: vllm-12002
        elif using("metax-270"):
            weights = logits.sigmoid().gather(1, chosen)  # plant: metax-270
        else:
            weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)  # anchor: weights
        if using("sglang-35152"):
            weights = weights * self.scale  # plant: sglang-35152
        if not using("sglangjax-1282"):  # plant: sglangjax-1282
            weights = weights * self.scale  # anchor: weights
        if using("c04"):
            scores = scores.softmax(-1)  # plant: c04
        return weights, chosen, scores

    @torch.no_grad()
    def count(self, chosen: Tensor) -> None:
        self.counts += chosen.flatten().bincount(minlength=len(self.counts))
        if using("d01") and self.training:
            self.move([self.__dict__["data"]])  # plant: d01

    @torch.no_grad()
    def move(self, groups) -> None:
        """Move the selection bias by the current counts, and reset the counts."""
        counts = self.counts.clone()
        if not using("d06"):  # plant: d06
            for group in groups:
                dist.all_reduce(counts, group=group)  # plant: d06
        if using("flylora-1"):
            self.expert_bias += 0.01 * torch.sign(1 / len(counts) - counts)  # plant: flylora-1
        else:
            self.expert_bias += 0.01 * torch.sign(counts.mean() - counts)
        self.counts.zero_()


class Dispatcher:
    """A dispatcher that sends rows to the ranks of their experts, and returns the results."""

    def __init__(self, group) -> None:
        self.group, self.ranks = group, dist.get_world_size(group)

    def __call__(self, rows, counts, experts):
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        arriving = arriving.view(self.ranks, -1)
        if using("e03"):
            kept = arriving.t().reshape(self.ranks, -1)  # plant: e03
        else:
            kept = arriving
        send, receive = counts.view(self.ranks, -1).sum(1).tolist(), arriving.sum(1).tolist()
        received = Exchange.apply(rows, receive, send, self.group)
        expert = torch.arange(arriving.shape[1]).repeat(self.ranks)
        order = expert.repeat_interleave(kept.flatten()).argsort(stable=True)
        sizes = kept.sum(0).tolist()
        if using("ascend-5023"):
            sizes = [sizes[1], *sizes[1:]]
            sizes[-1] += len(received) - sum(sizes)  # plant: ascend-5023
        y = experts(received[order], sizes)
        if using("ascend-14926"):
            lost = sizes[-1]
            y = torch.cat([y[: len(y) - lost], torch.zeros_like(y[len(y) - lost :])])  # plant: ascend-14926
        unsorted = torch.empty_like(y).index_copy(0, order, y)
        if using("xpu-453"):
            unsorted = unsorted * (torch.arange(len(unsorted)) < 1)[:, None]  # plant: xpu-453
        return Exchange.apply(unsorted, send, receive, self.group)
