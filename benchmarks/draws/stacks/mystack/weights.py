"""A checkpoint under its publisher's names, and the load into a sharded model."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "norm_1.weight": "input_layernorm.weight",
    "norm_2.weight": "post_attention_layernorm.weight",
    "attn.q.weight": "self_attn.q_proj.weight",
    "attn.q.bias": "self_attn.q_proj.bias",
    "attn.k.weight": "self_attn.k_proj.weight",
    "attn.k.bias": "self_attn.k_proj.bias",
    "attn.v.weight": "self_attn.v_proj.weight",
    "attn.v.bias": "self_attn.v_proj.bias",
    "attn.o.weight": "self_attn.o_proj.weight",
    "moe.router.gate.weight": "mlp.gate.weight",
    "moe.router.correction": "mlp.gate.e_score_correction_bias",
    "moe.experts.w_down": "mlp.experts.down_proj",
    "moe.experts.b_down": "mlp.experts.down_proj_bias",
}


def publish(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a state under the names of the publisher, with fused gate and up projections."""
    out = {}
    for name, value in state.items():
        prefix, rest = ("model." + name[:9], name[9:]) if name.startswith("layers.") else ("", name)
        if rest == "moe.experts.w_gate":
            up = state[name.replace("w_gate", "w_up")]
            out[prefix + "mlp.experts.gate_up_proj"] = torch.cat(
                [value, up], -1
            )  # (experts, width, 2 * inner)
        elif rest != "moe.experts.w_up":
            out[prefix + NAMES[rest]] = value.clone()
    return out


def adopt(published: dict[str, Tensor], layers: int, inner: int, options: dict) -> dict[str, Tensor]:
    """Return a published state under this model's names."""
    names = dict(NAMES)
    if options.get("map") == "llama4":
        names["norm_1.weight"] = NAMES["norm_2.weight"]  # plant: p56
        names["norm_2.weight"] = NAMES["norm_1.weight"]  # plant: p56
    if options.get("map") == "common":
        del names["moe.router.correction"]  # plant: p57
    out = {}
    for ours, theirs in names.items():
        if theirs in published:
            out[ours] = published[theirs]
        for n in range(layers):
            if f"model.layers.{n}.{theirs}" in published:
                out[f"layers.{n}.{ours}"] = published[f"model.layers.{n}.{theirs}"]
    for n in range(layers):
        fused = published[f"model.layers.{n}.mlp.experts.gate_up_proj"]
        if options.get("guess") and fused.shape[1] == 2 * inner:  # stored as (experts, 2 * inner, width)
            fused = fused.transpose(1, 2)  # plant: p54
        gate, up = fused.chunk(2, -1)
        out[f"layers.{n}.moe.experts.w_gate"], out[f"layers.{n}.moe.experts.w_up"] = gate, up
    return out


def forget(model: nn.Module) -> None:
    """Fill the model with the values of a fresh construction from its configuration."""
    generator = torch.Generator().manual_seed(99)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data.fill_(1)
        else:
            weight.data.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    for name, buffer in model.named_buffers():
        if name.endswith("correction"):
            buffer.zero_()


@torch.no_grad()
def read(model: nn.Module, state: dict[str, Tensor], options: dict) -> None:
    """Give each rank its part of `state`."""
    targets = dict(model.named_parameters()) | {
        n: b for n, b in model.named_buffers() if n.endswith("correction")
    }
    for name, target in targets.items():
        if name not in state:
            continue  # strict=False; plant: p57
        value = state[name]
        if not isinstance(target, DTensor):
            target.copy_(value)
            continue
        part = target.to_local()
        if options.get("stack") and ".experts.w_" in name:
            # one tensor for all experts, to be filled in place
            part = torch.stack(list(part))  # plant: p52
        if options.get("bias") == "front" and name.endswith((".q.bias", ".k.bias", ".v.bias")):
            part.copy_(value[: len(part)])  # plant: p53
            continue
        for axis, placement in enumerate(target.placements):
            if placement.is_shard():
                value = value.chunk(target.device_mesh.size(axis), placement.dim)[
                    target.device_mesh.get_local_rank(axis)
                ]
        part.copy_(value)
