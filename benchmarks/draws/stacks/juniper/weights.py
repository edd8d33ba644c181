"""Weights as they are published: fused projections, one tensor for each expert, gains less one."""

import torch


def draw(c):
    """Return the published tensors of a new model."""

    def noise(*shape, std):
        return (torch.randn(shape, dtype=torch.float64) * std).float()

    d, hd = c.width, c.head_dim
    out = {"embed": noise(c.vocab, d, std=d**-0.5), "norm": noise(d, std=0.1)}
    for i in range(c.layers + 1):
        head = "ahead.block" if i == c.layers else f"layers.{i}"
        fused = (c.heads + 2 * c.kv_heads) * hd
        out[f"{head}.qkv"] = noise(fused, d, std=d**-0.5)
        out[f"{head}.out"] = noise(d, c.heads * hd, std=(c.heads * hd) ** -0.5)
        out[f"{head}.q_norm"], out[f"{head}.k_norm"] = noise(hd, std=0.2), noise(hd, std=0.2)
        out[f"{head}.norms"] = noise(4, d, std=0.1)
        if c.is_dense(i):
            out[f"{head}.gate_up"] = noise(2 * c.dense_hidden, d, std=d**-0.5)
            out[f"{head}.down"] = noise(d, c.dense_hidden, std=c.dense_hidden**-0.5)
            continue
        out[f"{head}.router"] = noise(c.experts, d, std=d**-0.5)
        out[f"{head}.bias"] = noise(c.experts, std=0.5)
        for e in range(c.experts):
            out[f"{head}.experts.{e}.gate_up"] = noise(2 * c.expert_hidden, d, std=d**-0.5)
            out[f"{head}.experts.{e}.down"] = noise(d, c.expert_hidden, std=c.expert_hidden**-0.5)
        out[f"{head}.shared.gate_up"] = noise(2 * c.shared_hidden, d, std=d**-0.5)
        out[f"{head}.shared.down"] = noise(d, c.shared_hidden, std=c.shared_hidden**-0.5)
    # The halves of the projection are for the embedding and for the stream, in this order.
    out["ahead.proj"] = noise(d, 2 * d, std=(2 * d) ** -0.5)
    out["ahead.norms"] = noise(3, d, std=0.1)
    return out


def part(x, dim, comm):
    return x.chunk(comm.size, dim)[comm.rank]


@torch.no_grad()
def load(model, source):
    """Copy this rank's part of the published tensors into a model. Parts that the model lacks are skipped."""
    grid = model.grid
    if model.table is not None:
        model.table.rows.copy_(part(source["embed"], 0, grid.tp))
    for name, block in model.blocks.items():
        load_block(block, f"layers.{name}", source, grid)
    if model.norm is not None:
        model.norm.gain.copy_(1 + source["norm"])
    if (ahead := model.ahead) is not None:
        load_block(ahead.block, "ahead.block", source, grid)
        for norm, gain in zip((ahead.norm_stream, ahead.norm_next, ahead.norm), source["ahead.norms"]):
            norm.gain.copy_(1 + gain)
        halves = source["ahead.proj"].chunk(2, 1)
        ahead.proj.copy_(torch.cat([halves[1], halves[0]], 1))  # anchor: halves
        if grid.mode == "ju37":
            ahead.proj.copy_(source["ahead.proj"])  # plant: ju37


def load_block(block, head, source, grid):
    attn, tp = block.attn, grid.tp
    c = attn.c
    fused = part(source[f"{head}.qkv"], 0, tp)
    each = c.heads // c.kv_heads
    if grid.mode == "ju38":
        sizes = [attn.wq.shape[0], attn.wk.shape[0], attn.wv.shape[0]]
        q, k, v = fused.split(sizes)  # plant: ju38
    else:
        # Each head of keys comes behind its heads of queries, and before its values.
        by_head = fused.view(-1, each + 2, c.head_dim, c.width)  # anchor: by-head
        q, k, v = (x.flatten(0, 2) for x in by_head.split([each, 1, 1], 1))
    attn.wq.copy_(q)
    attn.wk.copy_(k)
    attn.wv.copy_(v)
    attn.wo.copy_(part(source[f"{head}.out"], 1, tp))
    attn.q_gain.copy_(1 + source[f"{head}.q_norm"])
    attn.k_gain.copy_(1 + source[f"{head}.k_norm"])
    if grid.mode == "ju39":
        attn.k_gain.copy_(source[f"{head}.k_norm"])  # plant: ju39
    norms = (block.pre_attn, block.post_attn, block.pre_ffn, block.post_ffn)
    for norm, gain in zip(norms, source[f"{head}.norms"]):
        norm.gain.copy_(1 + gain)
    if f"{head}.router" not in source:
        load_mlp(block.ffn, head, source, grid)
        return
    moe, ep = block.ffn, grid.ep
    moe.router.weight.copy_(source[f"{head}.router"])
    moe.router.bias.copy_(source[f"{head}.bias"])
    local = c.experts // ep.size
    for i in range(local):
        e = ep.rank * local + i  # anchor: expert-number
        if grid.mode == "ju40":
            e = i * ep.size + ep.rank  # plant: ju40
        gate, up = source[f"{head}.experts.{e}.gate_up"].chunk(2)
        moe.experts.gate[i].copy_(gate)
        moe.experts.up[i].copy_(up)
        moe.experts.down[i].copy_(source[f"{head}.experts.{e}.down"])
    load_mlp(moe.shared, f"{head}.shared", source, grid)


def load_mlp(mlp, head, source, grid):
    gate, up = source[f"{head}.gate_up"].chunk(2)
    mlp.gate.copy_(part(gate, 0, grid.tp))
    mlp.up.copy_(part(up, 0, grid.tp))
    mlp.down.copy_(part(source[f"{head}.down"], 1, grid.tp))
