"""The rules of the optimizer: schedule, decay, the update of NAdamW, and an average of the weights."""

import math

import torch
from torch import nn


def rate_of(step, config):
    """Return the factor of the learning rate: a linear warm-up, and a half cosine."""
    if step < config.warmup:
        return (step + 1) / config.warmup
    done = (step - config.warmup) / (config.total_steps - config.warmup)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def decays(name, parameter):
    return parameter.ndim > 1 and not name.startswith("table.")


def nadam(gradient, m, v, count, config):
    """Update the moments in place, and return the step that they give."""
    b1, b2 = config.betas
    m.lerp_(gradient, 1 - b1)
    v.lerp_(gradient.square(), 1 - b2)
    ahead = b1 * m / (1 - b1 ** (count + 1)) + (1 - b1) * gradient / (1 - b1**count)
    return ahead / ((v / (1 - b2**count)).sqrt() + config.eps)


class Ema(nn.Module):
    """An exponential moving average of the weights, in buffers."""

    def __init__(self, model):
        super().__init__()
        self.start(model)

    def start(self, model):
        for name, parameter in model.named_parameters():
            self.register_buffer(name.replace(".", "__"), parameter.detach().clone())

    @torch.no_grad()
    def update(self, model, decay):
        for name, parameter in model.named_parameters():
            self.get_buffer(name.replace(".", "__")).lerp_(parameter, 1 - decay)
