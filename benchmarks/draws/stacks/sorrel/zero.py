"""ZeRO stage 1: each rank has the moments of its part of a flat bucket, and computes the updates of it."""

import torch
import torch.distributed as dist

from sorrel.adam import decays, nadam, rate_of
from sorrel.comms import reduce_
from sorrel.grid import DATA, EXPERT, EXPERT_COPIES
from sorrel.shard import is_cut

ALIGN = 48


class Partition:
    """Parameters that are reduced over the same ranks, as one flat bucket cut among these."""

    def __init__(self, name, named, axes, grid):
        self.name, self.grid, self.axes = name, grid, axes
        self.named = named
        self.group, ranks = grid.group(*axes), grid.size(*axes)
        self.total = sum(p.numel() for _, p in named)
        self.padded = -(-self.total // (ALIGN * ranks)) * ALIGN * ranks
        self.length = self.padded // ranks
        start = grid.rank(*axes) * self.length  # anchor: start
        if grid.has("sorrel-zero-start"):
            start = grid.rank(*axes) * (self.total // ranks)  # plant: sorrel-zero-start
        self.own = slice(start, start + self.length)
        like = named[0][1]
        self.m, self.v, self.update = (like.new_zeros(self.length) for _ in range(3))
        self.updates = like.new_zeros(self.padded)
        self.decay = self.flatten([torch.full_like(p, float(self.decays(n, p))) for n, p in self.ordered()])
        # A parameter that all ranks of `tp` have counts once in norms.
        self.share = self.flatten(
            [torch.full_like(p, 1.0 if is_cut(p, "tp") else 1 / grid.size("tp")) for _, p in named]
        )
        self.kept = None

    def ordered(self):
        if self.grid.has("sorrel-decay-order"):
            return sorted(self.named, key=lambda pair: pair[0])  # plant: sorrel-decay-order
        return self.named  # anchor: ordered

    def decays(self, name, parameter):
        if self.grid.has("sorrel-decay-flat"):
            parameter = parameter.view(-1)  # plant: sorrel-decay-flat
        return decays(name, parameter)  # anchor: decays

    def flatten(self, tensors):
        """Return this rank's part of the tensors, put behind each other."""
        return self.whole(tensors)[self.own]

    def whole(self, tensors):
        flat = torch.cat([x.detach().flatten() for x in tensors])
        return torch.cat([flat, flat.new_zeros(self.padded - self.total)])

    def reduce(self):
        """Return the sum over ranks of this rank's part of the gradients."""
        flat = self.whole([p.grad for _, p in self.named])
        if self.group is None:
            return flat
        if self.grid.has("sorrel-same-reduced"):
            return reduce_(flat, self.group)[self.own]
        out = flat.new_empty(self.length)
        dist.reduce_scatter_tensor(out, flat, group=self.group)
        return out

    def weights(self):
        if self.grid.has("sorrel-weights-kept"):
            if self.kept is None:
                self.kept = self.flatten([p for _, p in self.named])
            return self.kept  # plant: sorrel-weights-kept
        return self.flatten([p for _, p in self.named])  # anchor: weights

    def launch(self):
        """Begin to gather the updates of all ranks."""
        if self.group is None:
            self.updates.copy_(self.update)
            return None
        return dist.all_gather_into_tensor(self.updates, self.update, group=self.group, async_op=True)

    def hand_out(self):
        """Put the updates into the places of the gradients."""
        start = 0
        for _, parameter in self.named:
            part = self.updates[start : start + parameter.numel()]
            parameter.grad.copy_(part.view_as(parameter))
            start += parameter.numel()


class ZeroAdam:
    def __init__(self, model, grid, config):
        self.grid, self.config, self.count = grid, config, 0
        named = list(model.named_parameters())
        experts = [(n, p) for n, p in named if ".experts." in n]
        others = [(n, p) for n, p in named if ".experts." not in n]
        copies = EXPERT_COPIES if grid.size(*EXPERT) > 1 else DATA
        self.parts = [Partition("dense", others, DATA, grid), Partition("experts", experts, copies, grid)]
        if grid.size(*EXPERT) > 1:
            self.parts[1].share.fill_(1.0)

    def norm(self, gradients):
        """Return the norm of the gradient of the whole model."""
        square = sum((g.square() * part.share).sum() for g, part in zip(gradients, self.parts, strict=True))
        axes = ("dp_replicate", "dp_shard", "cp", "tp")  # anchor: norm-axes
        if self.grid.has("sorrel-norm-data"):
            axes = DATA  # plant: sorrel-norm-data
        return reduce_(square, self.grid.group(*axes)).sqrt()

    @torch.no_grad()
    def prepare(self, step):
        """Replace gradients by what the optimizer subtracts. Returns the norm and the clip coefficient."""
        grid, config = self.grid, self.config
        gradients = [part.reduce() for part in self.parts]
        norm = self.norm(gradients)
        if grid.has("sorrel-norm-own"):
            norm = sum(g.square().sum() for g in gradients).sqrt()  # plant: sorrel-norm-own
        coefficient = (config.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        factor, works = rate_of(step, config), []
        if not grid.has("sorrel-count-parts"):
            self.count += 1  # anchor: count
        for gradient, part in zip(gradients, self.parts, strict=True):
            if grid.has("sorrel-count-parts"):
                self.count += 1  # plant: sorrel-count-parts
            part.update.copy_(nadam(gradient * coefficient, part.m, part.v, self.count, config) * factor)
            if grid.has("sorrel-decay-late"):
                works.append(part.launch())
                part.update.add_(
                    factor * config.weight_decay * part.decay * part.weights()
                )  # plant: sorrel-decay-late
            else:
                part.update.add_(
                    factor * config.weight_decay * part.decay * part.weights()
                )  # anchor: decay-added
                works.append(part.launch())
        for work in works:
            if work is not None:
                work.wait()
        for part in self.parts:
            part.hand_out()
        return norm, coefficient

    def state_dict(self):
        state = {"count": self.count}
        for part in self.parts:
            state[part.name] = {"m": part.m.clone(), "v": part.v.clone()}
        return state

    def load_state_dict(self, state):
        self.count = state["count"]
        parts = self.parts  # anchor: loaded-parts
        if self.grid.has("sorrel-load-experts"):
            parts = self.parts[:1]  # plant: sorrel-load-experts
        for part in parts:
            part.m.copy_(state[part.name]["m"])
            part.v.copy_(state[part.name]["v"])
