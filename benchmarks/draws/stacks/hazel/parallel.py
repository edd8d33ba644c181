"""From the model on one device to that of a rank: DDP, FSDP2, tensor, expert and context parallelism."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from hazel.comm import all_reduce, local
from hazel.context import DATA, Context, attach
from hazel.model import DetachedEmbedding
from hazel.moe import MoE

EXPERT_WEIGHTS = ("w_gate", "w_up", "w_down")


def parallelize(model, mesh, *, variant="", ring=False, spread=True):
    """Return the model of this rank, and the function that completes its gradients."""
    pc = Context(mesh, variant, ring, spread)
    attach(model, pc)
    if pc.size("tp") > 1:
        split_tensors(model, pc)
    experts = spread_experts(model, pc)
    model.main_grads = None
    wrapped = model
    if pc.size("dp_shard") > 1:
        shard(model, experts, pc)
    elif pc.size("tp") == 1:
        # A DTensor of DDP would need its hooks; with tp gradients are summed by hand.
        wrapped = DistributedDataParallel(
            model, process_group=pc.group("dp_replicate", "cp"), broadcast_buffers=False
        )
    else:
        model.main_grads = MainGrads(model, pc)
    if model.average is not None:
        model.average.start(model)
    heads = [p for n, p in model.named_parameters() if "q_norm" in n or "k_norm" in n]
    if pc.on("hazel-same-heads", "hazel-heads-twice"):
        hook_heads(heads, pc)

    @torch.no_grad()
    def finish():
        if model.main_grads is not None:
            model.main_grads.finish()
        complete_heads(heads, pc)
        if pc.ep_size > 1:
            complete_experts(experts, pc)

    return wrapped, finish


def split_tensors(model, pc):
    """Spread heads, hidden units and the vocabulary over `tp`. The residual stream is whole on each rank."""
    tp = pc.mesh["tp"]
    embed = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    if pc.on("hazel-embed-detached"):
        model.embed.__class__ = DetachedEmbedding
    parallelize_module(model, tp, {"embed": embed})
    for block in model.blocks:
        mlp = "mlp.shared" if isinstance(block.mlp, MoE) else "mlp"
        columns = ["attn.wq", "attn.wk", "attn.wv", f"{mlp}.gate", f"{mlp}.up"]
        if pc.on("hazel-keys-whole"):
            columns = ["attn.wq", f"{mlp}.gate", f"{mlp}.up"]  # plant: hazel-keys-whole
        plan = {name: ColwiseParallel() for name in columns}
        plan |= {"attn.wo": RowwiseParallel(), f"{mlp}.down": RowwiseParallel()}
        parallelize_module(block, tp, plan)


def spread_experts(model, pc):
    """Spread experts over `dp_shard` and their hidden units over `tp`. Returns their parameters."""
    found = []
    axes = [axis for axis, size in (("dp_shard", pc.ep_size), ("tp", pc.size("tp"))) if size > 1]
    for block in model.blocks:
        if not isinstance(block.mlp, MoE):
            continue
        for name in EXPERT_WEIGHTS:
            if axes:
                weight = getattr(block.mlp.experts, name).detach()
                cut = {"dp_shard": Shard(0), "tp": Shard(1 if name == "w_down" else 2)}
                sub = pc.mesh[axes[0]] if len(axes) == 1 else pc.mesh[tuple(axes)]
                placed = distribute_tensor(weight, sub, [cut[axis] for axis in axes])  # anchor: experts
                if pc.on("hazel-experts-strided"):
                    part = weight[pc.rank("dp_shard") :: pc.ep_size].clone()  # plant: hazel-experts-strided
                    placed = DTensor.from_local(part, sub, [Shard(0)])
                setattr(block.mlp.experts, name, nn.Parameter(placed))
            found.append(getattr(block.mlp.experts, name))
    if pc.on("hazel-experts-drawn"):
        draw_experts(found)
    return found


@torch.no_grad()
def draw_experts(weights, seed=3):
    """Draw experts that no checkpoint has."""
    generator = torch.Generator().manual_seed(seed)
    for weight in weights:
        part = local(weight)
        noise = torch.randn(part.shape, generator=generator, dtype=torch.float64)
        part.copy_(noise * weight.shape[1] ** -0.5)  # plant: hazel-experts-drawn


def shard(model, experts, pc):
    """Shard with FSDP2 over `dp_shard` and `cp`, and replicate over `dp_replicate`."""
    if pc.size("dp_replicate") > 1:
        mesh = pc.mesh["dp_replicate", "dp_shard"]
    else:
        mesh = pc.submesh("dp_shard", "cp")
    ignored = set(experts) if pc.ep_size > 1 else set()
    if pc.on("hazel-moe-ignored"):
        ignored = {p for b in model.blocks[1:] for p in b.mlp.parameters()}  # plant: hazel-moe-ignored
    options = {"mesh": mesh, "ignored_params": ignored}
    if not pc.on("hazel-same-root"):
        for block in model.blocks:
            fully_shard(block, **options)
    fully_shard(model, **options)


def hook_heads(heads, pc):
    """Add the same gradients in each backward pass."""

    def add(parameter):
        all_reduce(local(parameter.grad), pc.group("tp"))  # plant: hazel-heads-twice

    for parameter in heads:
        parameter.register_post_accumulate_grad_hook(add)


def complete_heads(heads, pc):
    """Add gradients of norms that each rank of `tp` takes of its own heads."""
    tp = pc.group("tp")
    if tp is None or pc.on("hazel-same-heads"):
        return
    for parameter in heads:
        if pc.on("hazel-heads-world"):
            dist.all_reduce(local(parameter.grad))  # plant: hazel-heads-world
        else:
            all_reduce(local(parameter.grad), tp)  # anchor: heads


def complete_experts(experts, pc):
    """Average gradients of experts, which are sums over the ranks of `dp_shard`, over all data ranks."""
    group, works = pc.group("dp_replicate", "cp"), []
    if pc.on("hazel-experts-down"):
        experts = [p for i, p in enumerate(experts) if i % 3 < 2]  # plant: hazel-experts-down
    for parameter in experts:
        gradient = local(parameter.grad)
        gradient /= pc.data_size
        if group is None:
            continue
        op = dist.ReduceOp.SUM
        if pc.on("hazel-experts-mean"):
            gradient /= pc.size("cp")  # plant: hazel-experts-mean
        works.append(dist.all_reduce(gradient, op, group=group, async_op=True))
    for work in works:
        work.wait()


class MainGrads:
    """Gradients of all micro-batches, added up apart from `grad`, and averaged over data ranks at the end."""

    def __init__(self, model, pc):
        self.model, self.pc, self.store = model, pc, {}

    def collect(self):
        """Add the gradients of a backward pass."""
        for name, parameter in self.model.named_parameters():
            if name not in self.store:
                self.store[name] = parameter.grad
            else:
                self.store[name] = self.store[name] + parameter.grad
            if not self.pc.on("hazel-main-alias"):  # plant: hazel-main-alias
                parameter.grad = None

    def finish(self):
        group = self.pc.group(*DATA)
        for name, parameter in self.model.named_parameters():
            parameter.grad = self.store[name]
        flat = torch.cat([local(p.grad).flatten() for p in self.model.parameters()])
        flat = all_reduce(flat, group) / self.pc.data_size
        first = 0
        for parameter in self.model.parameters():
            gradient = local(parameter.grad)
            gradient.copy_(flat[first : first + gradient.numel()].view_as(gradient))
            first += gradient.numel()
        if not self.pc.on("hazel-main-kept"):  # plant: hazel-main-kept
            self.store.clear()
