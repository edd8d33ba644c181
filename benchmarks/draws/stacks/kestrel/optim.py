"""A custom AdamW, with groups by kind of parameter."""

import torch

from kestrel.parallel import plain


class AdamW(torch.optim.Optimizer):
    def __init__(self, groups, lr, betas=(0.9, 0.95), eps=1e-8, count=True):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.count = count

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state["exp_avg"] = torch.zeros_like(weight)
                    state["exp_avg_sq"] = torch.zeros_like(weight)
                self.update(weight, state, group)

    def update(self, weight, state, group):
        step = state["step"]
        if self.count:
            step.add_(1)
        else:
            step = step + 1  # plant: p27
        first, second = group["betas"]
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        state["exp_avg"].lerp_(weight.grad, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(weight.grad, weight.grad, value=1 - second)
        size = group["lr"] / (1 - first ** float(step))
        root = state["exp_avg_sq"].sqrt() / (1 - second ** float(step)) ** 0.5 + group["eps"]
        weight.addcdiv_(state["exp_avg"], root, value=-size)


def list_groups(model, decay, by_shape):
    named = list(model.named_parameters())
    if by_shape:
        kept = [w for _, w in named if w.ndim < 2]
    else:
        kept = [w for name, w in named if name.endswith("bias")]  # plant: p29
    ids = {id(w) for w in kept}
    return [
        {"params": [w for _, w in named if id(w) not in ids], "weight_decay": decay},
        {"params": kept, "weight_decay": 0.0},
    ]


def replicas(model, mesh, mode=""):
    from moeverify.train.engine import PreparedEngine
    from moeverify.train.parallelize_custom import ParallelizedCustomModel

    model, finish = plain(model, mesh)
    groups = list_groups(model, 0.1, by_shape=mode != "p29")
    groups = [group for group in groups if group["params"]]
    optimizer = AdamW(groups, lr=0.01, count=mode != "p27")
    return ParallelizedCustomModel(model, finalize=finish, engine=PreparedEngine(optimizer))
