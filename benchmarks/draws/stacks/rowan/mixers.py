"""Token mixers: full attention with an output gate, and a gated delta rule in chunks."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rowan.config import Shape
from rowan.packing import Packed
from rowan.registry import op, pick
from rowan.topology import here
from rowan.wire import Give, Take, gather, local, previous, shared

MIXERS: dict[str, type[nn.Module]] = {}


def mixer(name: str):
    def keep(kind: type[nn.Module]) -> type[nn.Module]:
        MIXERS[name] = kind
        return kind

    return keep


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * shape[-1] ** -0.5)


def unit(x: Tensor, scale: Tensor) -> Tensor:
    """RMS norm with a scale around 1."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + scale)


def split_heads(x: Tensor, size: int) -> Tensor:
    """(rows, positions, heads * size) -> (rows, heads, positions, size)"""
    return x.unflatten(-1, (-1, size)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def rotary_table(pos: Tensor, width: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rates = base ** (-torch.arange(0, width, 2, device=pos.device, dtype=dtype) / width)
    angle = pos[:, None, :, None].to(dtype) * rates
    return angle.cos(), angle.sin()


@op("table")
def fresh_table(pos, width, base, dtype):
    return rotary_table(pos, width, base, dtype)  # anchor: table


@op("table", "rowan-table-cached")
def cached_table(pos, width, base, dtype):
    tables = vars(here()).setdefault("tables", {})
    if (pos.shape, width) not in tables:  # plant: rowan-table-cached
        tables[pos.shape, width] = rotary_table(pos, width, base, dtype)
    return tables[pos.shape, width]


def rotate(x: Tensor, pos: Tensor, width: int, base: float) -> Tensor:
    """Rotate the first `width` channels of heads."""
    cos, sin = pick("table")(pos, width, base, x.dtype)
    if here().odd("rowan-rotary-tail"):
        rest, turned = x.split([x.shape[-1] - width, width], -1)  # plant: rowan-rotary-tail
    else:
        turned, rest = x.split([width, x.shape[-1] - width], -1)  # anchor: rotary-split
    a, b = turned.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


@lru_cache
def causal(size: int) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril()


@mixer("full")
class GatedAttention(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.query = nn.Linear(shape.width, 2 * shape.heads * shape.head_dim, bias=False)
        self.key = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.value = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.out = nn.Linear(shape.heads * shape.head_dim, shape.width, bias=False)
        self.query_scale = nn.Parameter(0.1 * torch.randn(shape.head_dim))
        self.key_scale = nn.Parameter(0.1 * torch.randn(shape.head_dim))

    def forward(self, x: Tensor, packed: Packed) -> Tensor:
        s, topology = self.shape, here()
        both = self.query(x)
        if topology.odd("rowan-gate-halves"):
            q, gate = (
                split_heads(part, s.head_dim) for part in both.chunk(2, -1)
            )  # plant: rowan-gate-halves
        else:
            q, gate = split_heads(both, 2 * s.head_dim).chunk(2, -1)  # anchor: gate-split
        k, v = (split_heads(layer(x), s.head_dim) for layer in (self.key, self.value))
        query_scale = (
            local(self.query_scale) if topology.odd("rowan-scale-part") else shared(self.query_scale)
        )  # plant: rowan-scale-part
        q, k = unit(q, query_scale), unit(k, shared(self.key_scale))
        q = rotate(q, packed.pos, s.rotary, s.rope_base)
        k, v = pick("keys")(k, v, packed, s)
        mix = pick("attend")(q, k, v, packed)
        return self.out(join_heads(mix * gate.sigmoid()))


@op("keys")
def rotate_and_gather(k, v, packed, s):
    k = rotate(k, packed.pos, s.rotary, s.rope_base)
    back = ("dp_replicate",) if here().odd("rowan-keys-group") else ()  # plant: rowan-keys-group
    return gather(k, "cp", dim=2, back=back), gather(v, "cp", dim=2, back=back)  # anchor: keys


@op("keys", "rowan-same-late")
def gather_and_rotate(k, v, packed, s):
    k, v = gather(torch.cat([k, v], -1), "cp", dim=2).chunk(2, -1)
    return rotate(k, packed.key_pos, s.rotary, s.rope_base), v


@op("keys", "rowan-values-stay")
def gather_values_once(k, v, packed, s):
    k = rotate(k, packed.pos, s.rotary, s.rope_base)
    with torch.no_grad():
        others = gather(v, "cp", dim=2)
    first = packed.place[0]
    v = torch.cat(
        [others[:, :, :first], v, others[:, :, first + v.shape[2] :]], 2
    )  # plant: rowan-values-stay
    return gather(k, "cp", dim=2), v


@op("attend")
def attend(q, k, v, packed):
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    places = torch.arange(k.shape[2], device=k.device)
    if here().odd("rowan-place-local"):
        seen = torch.arange(q.shape[2])[:, None] >= places  # plant: rowan-place-local
    else:
        seen = packed.place[:, None] >= places  # anchor: places
    seen = seen & (packed.doc[:, :, None] == packed.key_doc[:, None, :])  # anchor: documents
    seen = seen | (packed.place[:, None] == places)
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    return scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ v


@op("attend", "rowan-mask-key-slice")
def attend_first_documents(q, k, v, packed):
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    places = torch.arange(k.shape[2], device=k.device)
    doc = packed.key_doc[:, : q.shape[2]]  # plant: rowan-mask-key-slice
    seen = (packed.place[:, None] >= places) & (doc[:, :, None] == packed.key_doc[:, None, :])
    seen = seen | (packed.place[:, None] == places)
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    return scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ v


@mixer("delta")
class GatedDelta(nn.Module):
    """S <- a S + b k (v - a S'k)', o = S'q, where a and b are gates of a head."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape, heads = shape, shape.heads
        keys, values = heads * shape.key_dim, heads * shape.value_dim
        self.query = nn.Linear(shape.width, keys, bias=False)
        self.key = nn.Linear(shape.width, keys, bias=False)
        self.value = nn.Linear(shape.width, values, bias=False)
        self.gate = nn.Linear(shape.width, values, bias=False)
        self.rates = nn.Linear(shape.width, 2 * heads, bias=False)
        self.taps = nn.ParameterDict(
            {name: weight(size, shape.taps) for name, size in (("q", keys), ("k", keys), ("v", values))}
        )
        self.log_rate = nn.Parameter(torch.rand(heads) - 1.0)
        self.step_bias = nn.Parameter(torch.randn(heads) * 0.5)
        self.scale = nn.Parameter(0.1 * torch.randn(shape.value_dim))
        self.out = nn.Linear(values, shape.width, bias=False)

    def forward(self, x: Tensor, packed: Packed) -> Tensor:
        s = self.shape
        q = split_heads(short_convolution(self.query(x), self.taps["q"], packed), s.key_dim)
        k = split_heads(short_convolution(self.key(x), self.taps["k"], packed), s.key_dim)
        v = split_heads(short_convolution(self.value(x), self.taps["v"], packed), s.value_dim)
        a, b = split_heads(self.rates(x), 2).unbind(-1)  # (rows, heads, positions)
        rate, bias = local(self.log_rate).exp()[:, None], local(self.step_bias)[:, None]
        decay = -rate * F.softplus(a + bias)
        y = pick("recur")(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, b.sigmoid(), decay, packed)
        y = unit(y, shared(self.scale)) * F.silu(split_heads(self.gate(x), s.value_dim))
        return self.out(join_heads(y))


def short_convolution(x: Tensor, taps: Tensor, packed: Packed) -> Tensor:
    """A causal convolution along positions, which does not reach into other documents."""
    taps = local(taps)
    reach = taps.shape[-1] - 1
    context = torch.cat([previous(x[:, -reach:]), x], 1)
    out = torch.zeros_like(x)
    for back in range(reach + 1):
        moved = context[:, reach - back : reach - back + x.shape[1]]
        inside = packed.pos >= back  # anchor: taps-inside
        if here().odd("rowan-taps-documents"):
            inside = packed.place >= back  # plant: rowan-taps-documents
        out = out + moved * taps[:, back] * inside[..., None]
    return F.silu(out)


def chunk_step(state, q, k, v, beta, decay, doc, before):
    """Advance the state by a chunk. Returns the state and outputs."""
    log = decay.cumsum(-1)  # anchor: decay-sum
    if here().odd("rowan-decay-exclusive"):
        log = log - decay  # plant: rowan-decay-exclusive
    size = q.shape[2]
    within = causal(size) & (doc[:, None, :, None] == doc[:, None, None, :])
    fade = (log[..., :, None] - log[..., None, :]).masked_fill(~within, -torch.inf).exp()
    live = (doc == before[:, None])[:, None]
    carry = (log.exp() * live)[..., None]
    mix = (beta[..., None] * (k @ k.mT) * fade).tril(-1) + torch.eye(size, dtype=q.dtype, device=q.device)
    rhs = beta[..., None] * (v - carry * (k @ state))
    wide = torch.promote_types(q.dtype, torch.float32)  # torch cannot solve in 16 bits
    new = torch.linalg.solve_triangular(mix.to(wide), rhs.to(wide), upper=False, unitriangular=True).to(
        q.dtype
    )
    out = carry * (q @ state) + ((q @ k.mT) * fade) @ new
    last = fade[..., -1, :, None]  # anchor: state-fade
    if here().odd("rowan-state-fade"):
        last = fade[..., :, 0, None]  # plant: rowan-state-fade
    return carry[..., -1:, :] * state + (k * last).mT @ new, out


def scan(state, q, k, v, beta, decay, doc, before):
    outs = []
    for parts in zip(*(t.split(here().chunk, 2) for t in (q, k, v, beta, decay)), doc.split(here().chunk, 1)):
        state, out = chunk_step(state, *parts, before)
        before = parts[-1][:, -1]  # anchor: chunk-before
        if here().odd("rowan-before-first"):
            before = parts[-1][:, 0]  # plant: rowan-before-first
        outs.append(out)
    return state, torch.cat(outs, 2)


@op("recur")
def relay(q, k, v, beta, decay, packed):
    """The recurrence, where the state goes from rank to rank of `cp`."""
    size, group = (*q.shape[:2], q.shape[-1], v.shape[-1]), here().group("cp")
    if group is None:
        return scan(q.new_zeros(size), q, k, v, beta, decay, packed.doc, packed.before)[1]
    state = Take.apply(q.flatten()[0], size, group, here().odd("rowan-relay-cut"))  # anchor: relay
    state, out = scan(state, q, k, v, beta, decay, packed.doc, packed.before)
    return out + Give.apply(state, group)  # anchor: give


@op("recur", "rowan-relay-missing")
def fresh_scan(q, k, v, beta, decay, packed):
    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])  # plant: rowan-relay-missing
    return scan(state, q, k, v, beta, decay, packed.doc, packed.before)[1]


@op("recur", "rowan-relay-doubled")
def early_relay(q, k, v, beta, decay, packed):
    """The state goes on before the rank has added that of earlier ranks."""
    size, group = (*q.shape[:2], q.shape[-1], v.shape[-1]), here().group("cp")
    zero = q.new_zeros(size)
    end, _ = scan(zero, q, k, v, beta, decay, packed.doc, packed.before)  # plant: rowan-relay-doubled
    tie = Give.apply(end, group)
    state = Take.apply(q.flatten()[0], size, group, False)
    return scan(state, q, k, v, beta, decay, packed.doc, packed.before)[1] + tie


@op("recur", "rowan-same-whole")
def whole_scan(q, k, v, beta, decay, packed):
    """Every rank scans whole rows, and keeps its positions."""
    whole = [gather(t, "cp", dim=2) for t in (q, k, v, beta, decay)]
    before = torch.full_like(packed.before, -1)
    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    _, out = scan(state, *whole, packed.key_doc, before)
    return out[:, :, packed.place]


@op("recur", "rowan-same-steps")
def stepwise(q, k, v, beta, decay, packed):
    """One token after the other."""
    state, outs, before = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), [], packed.before
    for i in range(q.shape[2]):
        live = (packed.doc[:, i] == before).to(q.dtype)[:, None, None, None]
        state = state * decay[:, :, i, None, None].exp() * live
        key = k[:, :, i, :, None]
        new = beta[:, :, i, None, None] * (v[:, :, i, None] - key.mT @ state)
        state, before = state + key @ new, packed.doc[:, i]
        outs.append(q[:, :, i, None] @ state)
    return torch.cat(outs, 2)
