"""The network: blocks of a mixer and a feed-forward layer, a functional residual tail, and a tied head."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from rowan.config import Mixture, Shape
from rowan.experts import feed_forward
from rowan.mixers import MIXERS, unit
from rowan.packing import pack
from rowan.topology import Topology, use
from rowan.wire import gather, local, shared
from rowan.xent import token_losses


class Norm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return unit(x, self.weight)


def keep_products(ctx, op, *args, **kwargs) -> CheckpointPolicy:
    kept = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE


class Block(nn.Module):
    def __init__(self, kind: str, shape: Shape):
        super().__init__()
        mixer, feed = kind.split(":")
        self.norm_mix, self.norm_feed = Norm(shape.width), Norm(shape.width)
        self.mixer = MIXERS[mixer](shape)
        self.feed = feed_forward(feed, shape)

    def forward(self, x, packed, topology: Topology):
        x = x + self.mixer(self.norm_mix(x), packed)
        if not topology.remat:
            return x + self.feed(self.norm_feed(x))
        contexts = partial(create_selective_checkpoint_contexts, keep_products)
        return x + checkpoint(Replayed(self, topology), x, use_reentrant=False, context_fn=contexts)


class Replayed:
    """The feed-forward half of a block. The second call, in the backward pass, does not count loads again."""

    def __init__(self, block: Block, topology: Topology):
        self.block, self.topology, self.calls = block, topology, 0

    def __call__(self, x: Tensor) -> Tensor:
        router = getattr(self.block.feed, "router", None)
        if router is not None:
            router.replays = self.calls > 0
        self.calls += 1
        with use(self.topology):
            y = self.block.feed(self.block.norm_feed(x))
        if router is not None:
            router.replays = False
        return y


class Adapter(nn.Module):
    """The function of the tail, called with the parameters of the network."""

    def __init__(self, width: int):
        super().__init__()
        self.down = nn.Parameter(torch.zeros(width, width // 2))
        self.up = nn.Parameter(torch.zeros(width // 2, width))

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x @ self.down) @ self.up


class Net(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.shape, self.topology = shape, Topology()
        self.embed = nn.Embedding(shape.vocab, shape.width)
        self.blocks = nn.ModuleList(Block(kind, shape) for kind in shape.blocks)
        self.final = Norm(shape.width)
        half = shape.width // 2
        # Kept transposed, as the adapter's checkpoints are.
        self.tail = nn.ParameterDict({"up": nn.Parameter((torch.randn(shape.width, half) * half**-0.5).t())})
        self.tail["down"] = nn.Parameter(torch.randn(shape.width, half) * shape.width**-0.5)
        self.adapter = (Adapter(shape.width),)
        self.logits = partial(project, self.embed)
        if shape.ema:
            self.average = Average(self)

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        with use(self.topology) as topology:
            packed = pack(tokens, self.shape.first_word)
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x, packed, topology)
            x = self.final(x)
            x = x + functional_call(self.adapter[0], {k: shared(w) for k, w in self.tail.items()}, (x,))
            divide = topology.size("tp") if topology.odd("rowan-head-mean") else 1  # plant: rowan-head-mean
            losses, lse = token_losses(self.logits(gather(x, "tp", dim=1, divide=divide)), targets)
            valid = lse.where(targets >= 0, 0)
            return {"xent": losses.sum(), "z": self.shape.z_coef * valid.square().sum()}


def project(embed: nn.Embedding, x: Tensor) -> Tensor:
    """Return the logits of this rank's rows of the vocabulary."""
    return x @ local(embed.weight).t()  # anchor: project


def project_by(weight: Tensor, x: Tensor) -> Tensor:
    return x @ weight.t()


class Average(nn.Module):
    """Moving averages of some weights, with a decay that grows with the number of updates."""

    def __init__(self, net: Net):
        super().__init__()
        self.updates = 0
        for name, weight in averaged(net):
            self.register_buffer(name.replace(".", "_"), weight.detach().clone())

    @torch.no_grad()
    def update(self, net: Net) -> None:
        self.updates += 1
        decay = min(0.9, self.updates / (self.updates + 3))
        for name, weight in averaged(net):
            getattr(self, name.replace(".", "_")).lerp_(local(weight.detach()), 1 - decay)


def averaged(net: Net):
    """Yield the weights of norms and routers, which are whole on every rank."""
    for name, weight in net.named_parameters():
        if "norm_" in name or "router" in name:
            yield name, weight


def build(ema: bool = False, blocks: tuple[str, ...] = (), **mixture) -> Net:
    """Return the network with initial values drawn in float64."""
    shape = Shape(ema=ema, mixture=Mixture(**mixture), **({"blocks": tuple(blocks)} if blocks else {}))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return Net(shape).float()
    finally:
        torch.set_default_dtype(before)


def loss(net: Net, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return net(tokens, targets)
