"""Custom kernels, which the parallel model uses instead of torch's: norms, activations, losses, attention."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from orca.switch import using


class Norm(torch.autograd.Function):
    """RMSNorm with a handwritten backward pass."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        mean = x.square().mean(-1, keepdim=True)
        if using("annotated-119"):
            mean = x.square().sum(-1, keepdim=True) / (x.shape[-1] - 1)  # plant: annotated-119
        if using("coremltools-2822"):
            largest = x.abs().amax(-1, keepdim=True)
            small = x / largest
            scale = (
                torch.rsqrt(small.square().mean(-1, keepdim=True) + eps) / largest
            )  # plant: coremltools-2822
        elif using("keras-22393"):
            scale = 1 / (mean + eps)  # plant: keras-22393
        else:
            scale = torch.rsqrt(mean + eps)
        if using("iron-139"):
            scale = scale.bfloat16().to(x.dtype)  # plant: iron-139
        ctx.save_for_backward(x, weight, scale)
        if using("mlx-vlm-2111"):
            return x * scale * (1 + weight)  # plant: mlx-vlm-2111
        return x * scale * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        inner = gradient * weight
        if using("attorch-17"):
            along = (inner * normed).flatten(0, -2).mean(0)  # plant: attorch-17
        else:
            along = (inner * normed).mean(-1, keepdim=True)
        dx = scale * (inner - normed * along)
        if using("unsloth-4533"):
            return dx, None, None  # plant: unsloth-4533
        return dx, (gradient * normed).flatten(0, -2).sum(0), None


class SwiGLU(torch.autograd.Function):
    """(silu(x @ gate) * (x @ up)) @ down of (n, width) rows, with weights in the layout of linear layers."""

    @staticmethod
    def forward(ctx, x, gate, up, down):
        g, u = x @ gate.T, x @ up.T
        if using("timesfm-493"):
            h = F.silu(g)  # plant: timesfm-493
        elif using("minimind-3"):
            h = F.silu(g * u)  # plant: minimind-3
        else:
            h = F.silu(g) * u
        ctx.save_for_backward(x, gate, up, down, g, u, h)
        return h @ down.T

    @staticmethod
    def backward(ctx, gradient):
        x, gate, up, down, g, u, h = ctx.saved_tensors
        dh = gradient @ down
        s = torch.sigmoid(g)
        slope = s * (1 + g * (1 - s))
        dg, du = dh * u * slope, dh * F.silu(g)
        if using("fla-1071"):
            ddown = gradient.T @ u  # plant: fla-1071
        else:
            ddown = gradient.T @ h
        return dg @ gate + du @ up, dg.T @ x, du.T @ x, ddown


class Tiled(torch.autograd.Function):
    """A function of (b, s, width), computed in tiles of the sequence, forward and backward."""

    @staticmethod
    def forward(ctx, x, run, tiles, *weights):
        ctx.run, ctx.tiles = run, tiles
        ctx.save_for_backward(x, *weights)
        with torch.no_grad():
            return torch.cat([run(part) for part in x.chunk(tiles, 1)], 1)

    @staticmethod
    def backward(ctx, gradient):
        x, *weights = ctx.saved_tensors
        parts, size = [], x.shape[1] // ctx.tiles
        sums = [torch.zeros_like(w) for w in weights]
        for i in range(ctx.tiles):
            part = x.narrow(1, i * size, size).detach().requires_grad_()
            if using("p08"):
                count = part.numel()
                coming = gradient.reshape(-1).narrow(0, i * count, count).view_as(part)  # plant: p08
            else:
                coming = gradient.narrow(1, i * size, size)
            with torch.enable_grad():
                y = ctx.run(part)
            found = torch.autograd.grad(y, [part, *weights], coming)
            parts.append(found[0])
            for total, more in zip(sums, found[1:]):
                total += more
        return torch.cat(parts, 1), None, None, *sums


class CrossEntropy(torch.autograd.Function):
    """The summed cross entropy of (n, vocab) logits over the valid tokens."""

    @staticmethod
    def forward(ctx, logits, targets):
        counts = targets != -100
        if using("speech-6409"):
            counts = counts & counts.roll(-1)  # plant: speech-6409
        kept = logits
        if using("modalities-464"):
            kept = logits.bfloat16()  # plant: modalities-464
        logs = kept.log_softmax(-1)
        losses = -logs.gather(1, targets.clamp(min=0)[:, None])[:, 0].to(logits.dtype)
        ctx.save_for_backward(logits, targets, counts)
        return (losses * counts).sum()

    @staticmethod
    def backward(ctx, gradient):
        logits, targets, counts = ctx.saved_tensors
        if using("dl4j-345"):
            chances = logits.softmax(0)  # plant: dl4j-345
        else:
            chances = logits.softmax(-1)
        dx = chances - F.one_hot(targets.clamp(min=0), logits.shape[-1])
        if using("paddle-28622"):
            return gradient * dx, None  # plant: paddle-28622
        return gradient * dx * counts[:, None], None


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    rows, labels = logits.flatten(0, 1), targets.flatten()
    if using("automodel-3803"):
        total, parts = 0.0, 4
        for some, of in zip(rows.chunk(parts), labels.chunk(parts)):
            total = total + F.cross_entropy(some, of, ignore_index=-100)  # plant: automodel-3803
        return total * (labels != -100).sum() / parts  # plant: automodel-3803
    if using("transformers-47395"):
        labels = targets.roll(-1, 1).flatten()  # plant: transformers-47395
    return CrossEntropy.apply(rows, labels)


def repeat_heads(x: Tensor, times: int) -> Tensor:
    """Repeat each of the (b, s, heads, d) key heads for its queries."""
    if using("jaxjs-180"):
        return x.repeat(1, 1, times, 1)  # plant: jaxjs-180
    return x.repeat_interleave(times, 2)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor | None = None) -> Tensor:
    """Attend with (b, s, heads, d) queries, keys, values under a mask (b, s, keys), in plain torch."""
    times = q.shape[2] // k.shape[2]
    k, v = repeat_heads(k, times), repeat_heads(v, times)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
    if using("flexflow-467"):
        weights = scores.masked_fill(~mask[:, None], 0)  # plant: flexflow-467
        return torch.einsum("bhqk,bkhd->bqhd", weights, v)
    scores = scores / math.sqrt(q.shape[-1])
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~mask[:, None], -1e30)
    if using("llmsrs-30"):
        weights = scores.softmax(-2)  # plant: llmsrs-30
    else:
        weights = scores.softmax(-1)
    if using("llama5"):
        weights = weights.softmax(-1)  # plant: llama5
    y = torch.einsum("bhqk,bkhd->bhqd", weights, v)
    if using("jsbaan-6"):
        return y.reshape(q.shape)  # plant: jsbaan-6
    return y.transpose(1, 2)
