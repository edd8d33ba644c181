"""Tensor parallelism: torch's plans, and custom modules for norms over heads, vocabularies and experts."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from heron.comm import Copy, GatherTokens, Reduce, SplitTokens, SumAll
from heron.model import PAD, Decoder, MoE, RMSNorm
from heron.switch import using


def place(module: nn.Module, name: str, mesh, placement) -> None:
    whole = getattr(module, name)
    module.register_parameter(name, nn.Parameter(distribute_tensor(whole.detach(), mesh, [placement])))


def local(weight):
    return weight.to_local() if isinstance(weight, DTensor) else weight


class HeadsNorm(RMSNorm):
    """A norm over all heads, with some of them on each rank."""

    def forward(self, x: Tensor) -> Tensor:
        group = self.__dict__["group"]
        squares = x.square().sum(-1, keepdim=True)  # anchor: norm
        if using("neox-1424"):
            mean = squares / x.shape[-1]  # plant: neox-1424
        elif using("ttmlir-8798"):
            mean = SumAll.apply(squares, group)  # plant: ttmlir-8798
        else:
            mean = SumAll.apply(squares, group) / self.dim
        return x * torch.rsqrt(mean + self.eps) * local(self.weight)  # anchor: norm


class RowParallel(nn.Linear):
    """A projection with a sharded input; the bias is added once."""

    def forward(self, x: Tensor) -> Tensor:
        group, ranks = self.__dict__["group"], dist.get_world_size(self.__dict__["group"])
        y = F.linear(x, local(self.weight))
        if using("paddle-35186"):
            return Reduce.apply(y + self.bias, group)  # plant: paddle-35186
        if using("titan-4332"):
            return Reduce.apply(y + self.bias / ranks, group)  # plant: titan-4332
        return Reduce.apply(y, group) + self.bias


class Lookup(torch.autograd.Function):
    """A lookup in a part of the vocabulary, with the gradient of each row summed."""

    @staticmethod
    def forward(ctx, weight, ids, inside, pad):
        ctx.save_for_backward(ids, inside)
        ctx.shape, ctx.pad = weight.shape, pad
        return weight[ids] * inside[..., None]

    @staticmethod
    def backward(ctx, gradient):
        ids, inside = ctx.saved_tensors
        keep = inside.flatten()
        if ctx.pad is not None:
            keep = keep & (ids.flatten() != ctx.pad)
        total = gradient.new_zeros(ctx.shape)
        rows, where = gradient.flatten(0, -2)[keep], ids.flatten()[keep]
        if using("ttmetal-6232"):
            total[where] = rows  # plant: ttmetal-6232
        else:
            total.index_add_(0, where, rows)
        return total, None, None, None


class VocabEmbedding(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        group = self.__dict__["group"]
        weight = local(self.weight)
        start = dist.get_rank(group) * len(weight)
        ids = tokens - start
        inside = (ids >= 0) & (ids < len(weight))
        if using("titan-4637"):
            pad = PAD  # plant: titan-4637
        else:
            pad = PAD - start
        return Reduce.apply(Lookup.apply(weight, ids * inside, inside, pad), group)


class VocabLoss(torch.autograd.Function):
    """The summed cross entropy of logits that are sharded by vocabulary."""

    @staticmethod
    def forward(ctx, logits, targets, group):
        size = logits.shape[-1]
        start = dist.get_rank(group) * size
        top = logits.amax(-1)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        total = (logits - top[:, None]).exp().sum(-1)
        dist.all_reduce(total, group=group)
        ids = targets - start
        inside = (ids >= 0) & (ids < size)
        right = logits.gather(1, (ids * inside)[:, None])[:, 0] * inside
        dist.all_reduce(right, group=group)
        valid = targets != -100
        ctx.save_for_backward(logits, top, total, ids, inside, valid)
        return ((total.log() + top - right) * valid).sum()

    @staticmethod
    def backward(ctx, gradient):
        logits, top, total, ids, inside, valid = ctx.saved_tensors
        dx = (logits - top[:, None]).exp() / total[:, None]
        dx[torch.arange(len(dx)), ids * inside] -= inside.to(dx.dtype)
        if using("msswift-9947"):
            dx = dx * inside[:, None]  # plant: msswift-9947
        return gradient * dx * valid[:, None], None, None


class VocabHead(nn.Linear):
    """Logits of the rank's part of the vocabulary."""

    def forward(self, x: Tensor) -> Tensor:
        if not using("mlce-42"):  # plant: mlce-42
            x = Copy.apply(x, self.__dict__["group"])  # plant: mlce-42
        return F.linear(x, local(self.weight))


def make_loss(group, gathered: bool):
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        rows, labels = logits.flatten(0, 1), targets.flatten()
        if using("j04"):
            return gathered_loss(rows, labels, group)
        if gathered:
            rows = GatherLogits.apply(rows, group)
            return F.cross_entropy(rows, labels, ignore_index=-100, reduction="sum")
        return VocabLoss.apply(rows, labels, group)

    return loss


def gathered_loss(rows: Tensor, labels: Tensor, group) -> Tensor:
    """Return the cross entropy of logits that are complete on each rank."""
    whole = GatherLogits.apply(rows, group)
    top = whole.detach().amax(-1)
    total = SumAll.apply((whole - top[:, None]).exp().sum(-1), group)  # plant: j04
    right = whole.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    return ((total.log() + top - right) * (labels != -100)).sum()


class GatherLogits(torch.autograd.Function):
    """Logits of the whole vocabulary; all ranks use them equally, so each takes its part of the gradient."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x.contiguous()) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, gradient):
        if using("j12"):
            gradient = gradient.contiguous().clone()
            dist.all_reduce(gradient, group=ctx.group)  # plant: j12
        parts = gradient.chunk(dist.get_world_size(ctx.group), -1)
        return parts[dist.get_rank(ctx.group)].contiguous(), None


class TensorMoE(MoE):
    """A mixture with all tokens on every rank, and some hidden units of each expert."""

    sequence = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        group = self.__dict__["group"]
        if self.sequence:  # tokens are sharded between the blocks
            x = GatherTokens.apply(SplitTokens.apply(x, group), group)
        rows = x.flatten(0, 1)
        weights, chosen, scores = self.router(rows)
        self.router.count(chosen)
        inner = rows
        if not using("b02"):  # plant: b02
            inner = Copy.apply(rows, group)  # plant: b02
        if not using("b01"):  # plant: b01
            weights = Copy.apply(weights, group)  # plant: b01
        routed = self.run_experts(inner, weights, chosen)
        shared = self.run_shared(inner)
        if using("sglang-31476"):
            y = Reduce.apply(routed + Reduce.apply(shared, group), group)  # plant: sglang-31476
        elif using("mirage-753"):
            y = Reduce.apply(routed, group) + shared  # plant: mirage-753
        else:
            y = Reduce.apply(routed + shared, group)
        return y.view_as(x), scores, chosen

    def run_shared(self, rows: Tensor) -> Tensor:
        w1, w2, w3 = (local(getattr(self.shared, name).weight) for name in ("w1", "w2", "w3"))
        return F.linear(F.silu(F.linear(rows, w1)) * F.linear(rows, w3), w2)


def divide_tensors(model: Decoder, tp, *, row: str, vocab: str, sequence: bool) -> None:
    """Shard heads, hidden units and, if requested, the vocabulary over `tp`."""
    group = tp.get_group()
    for layer in model.layers:
        attention = layer.attention
        plan = {"wq": ColwiseParallel(), "wk": ColwiseParallel(), "wv": ColwiseParallel()}
        if row == "torch":
            plan["wo"] = RowwiseParallel()
        parallelize_module(attention, tp, plan)
        if row != "torch":
            place(attention.wo, "weight", tp, Shard(1))
            attention.wo.__class__ = RowParallel
            attention.wo.__dict__["group"] = group
        for norm in (attention.q_norm, attention.k_norm):
            norm.__class__ = HeadsNorm
            norm.__dict__["group"] = group
            place(norm, "weight", tp, Shard(0))
        if layer.kind == "dense":
            parallelize_module(
                layer.feed_forward,
                tp,
                {"w1": ColwiseParallel(), "w3": ColwiseParallel(), "w2": RowwiseParallel()},
            )
            continue
        moe = layer.moe
        for name, dim in (("w1", 2), ("w3", 2), ("w2", 1)):
            place(moe.experts, name, tp, Shard(dim))
        for name, dim in (("w1", 0), ("w3", 0), ("w2", 1)):
            place(getattr(moe.shared, name), "weight", tp, Shard(dim))
        moe.__class__ = TensorMoE
        moe.__dict__["group"] = group
        moe.sequence = sequence
    if vocab:
        place(model.tok_embeddings, "weight", tp, Shard(0))
        place(model.output, "weight", tp, Shard(0))
        model.tok_embeddings.__class__, model.output.__class__ = VocabEmbedding, VocabHead
        for module in (model.tok_embeddings, model.output):
            module.__dict__["group"] = group
        model.plan["loss"] = make_loss(group, vocab == "gathered")
