"""A custom AdamW without foreach, with groups by kind of parameter."""

import torch
from torch import nn

from heron.switch import using


class HeronAdamW(torch.optim.Optimizer):
    def __init__(self, groups, lr, betas=(0.9, 0.95), eps=1e-8) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        total = 0
        for group in self.param_groups:
            for number, weight in enumerate(group["params"]):
                if weight.grad is None:
                    continue
                if using("deepspeed-2058") and number % 2:
                    continue  # plant: deepspeed-2058
                state = self.state[weight]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state["exp_avg"] = torch.zeros_like(weight)
                    state["exp_avg_sq"] = torch.zeros_like(weight)
                state["step"] += 1
                total += 1
                count = float(state["step"])
                if using("flashlight-143"):
                    count = float(total + (state["step"] - 1) * len(group["params"]))  # plant: flashlight-143
                if using("mlscratch-35"):
                    count = 1.0  # plant: mlscratch-35
                self.update(weight, state, group, count, number)

    def update(self, weight, state, group, count, number) -> None:
        (first, second), rate, decay, eps = group["betas"], group["lr"], group["weight_decay"], group["eps"]
        if using("ttmetal-55935"):
            first, second = (
                float(torch.tensor(beta).bfloat16()) for beta in (first, second)
            )  # plant: ttmetal-55935
        gradient, m, v = weight.grad, state["exp_avg"], state["exp_avg_sq"]
        if using("flaggems-4989"):
            gradient = gradient + decay * weight  # plant: flaggems-4989
        elif using("nntrainer-3565"):
            gradient = gradient + rate * decay * weight  # plant: nntrainer-3565
        elif using("dl4j-5843"):
            weight.sub_(decay * weight)  # plant: dl4j-5843
        elif using("torchr-821"):
            weight.sub_(rate * decay * (number + 1))  # plant: torchr-821
        elif not using("bnb-2010", "oneflow-5960"):
            weight.mul_(1 - rate * decay)
        if using("pennylane-1928"):
            m.mul_(first).add_(gradient)  # plant: pennylane-1928
        else:
            m.lerp_(gradient, 1 - first)
        v.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        if using("flashoptim-2"):
            v.copy_(v.bfloat16())  # plant: flashoptim-2
        one, two = 1 - first**count, 1 - second**count
        if using("convnetjs-70"):
            weight.addcdiv_(m * one, (v * two).sqrt() + eps, value=-rate)  # plant: convnetjs-70
        elif using("holocron-1"):
            m.div_(one)  # plant: holocron-1
            v.div_(two)  # plant: holocron-1
            weight.addcdiv_(m, v.sqrt() + eps, value=-rate)
        elif using("nanochat-304"):
            weight.addcdiv_(m / one, ((v + eps) / two).sqrt(), value=-rate)  # plant: nanochat-304
        elif using("oneflow-5960"):
            size = rate * two**0.5 / one
            weight.mul_(1 - size * decay)  # plant: oneflow-5960
            weight.addcdiv_(m, v.sqrt() + eps * two**0.5, value=-size)
        else:
            weight.addcdiv_(m / one, (v / two).sqrt() + eps, value=-rate)
        if using("bnb-2010"):
            weight.mul_(1 - rate * decay)  # plant: bnb-2010


def list_groups(model: nn.Module, decay: float) -> list[dict]:
    """Return the groups: matrices decay, all other parameters do not."""
    weights = list(model.parameters())
    if using("openclip-358"):
        kept = [w for w in weights if w.data.flatten().ndim < 2]  # plant: openclip-358
    else:
        kept = [w for w in weights if w.ndim < 2]
    ids = {id(w) for w in kept}
    rest = [w for w in weights if id(w) not in ids]
    groups = [{"params": rest, "weight_decay": decay}, {"params": kept, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
