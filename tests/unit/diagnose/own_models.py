"""A small model that nobody but its author knows, and what a replay of its modules says of a mistake in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from wrong_tensors import draw, examine

from moeverify.diagnose.first_divergence import Known, Origin, Search, find_origins
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.own.calls import Call, Recorder
from moeverify.diagnose.own.module import OwnModule
from moeverify.diagnose.rank_readings import RankReadings
from moeverify.results.own_module import Mistake, Mistaken
from moeverify.train.module_taps import Tap

ROWS, LENGTH, WIDTH, HEADS = 4, 6, 16, 4


class Mixer(nn.Module):
    """Attention of an unusual kind: its scores are capped, and its output is gated."""

    def __init__(self) -> None:
        super().__init__()
        self.scaling = 0.5
        self.cap = 3.0
        self.is_causal = True
        self.keys = nn.Linear(WIDTH, WIDTH)
        self.values = nn.Linear(WIDTH, WIDTH)
        self.first_norm = nn.RMSNorm(WIDTH)
        self.second_norm = nn.RMSNorm(WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        keys, values = self.first_norm(self.keys(x)), self.second_norm(self.values(x))
        scores = self.scaling * (keys @ keys.transpose(-1, -2))
        scores = self.cap * torch.tanh(scores / self.cap)
        if mask is not None:
            scores = scores + mask
        if self.is_causal:
            hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        weights = scores.softmax(-1)
        return self.out(F.silu(weights @ values)), weights


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.mixer = Mixer()
        self.expand = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed, _ = self.mixer(self.norm(x), mask=0.1 * torch.arange(LENGTH, dtype=x.dtype))
        x = x + mixed
        return x + self.expand(F.gelu(x))


def make_layer() -> Layer:
    """Return a layer with random parameters, float64: constants would hide what is exchanged or missing."""
    layer = Layer().double()
    for number, parameter in enumerate(layer.parameters()):
        parameter.data = draw(*parameter.shape, seed=number) * (0.4 if parameter.ndim > 1 else 1.0)
    return layer


Break = Callable[[Layer], object]


def find_mistakes(
    breaks: Break | Mapping[int, Break],
    *,
    spoil: Callable[[Tensor], Tensor] | None = None,
    prepare: Break | None = None,
) -> Mistaken | None:
    """Return what is said of a layer that is broken on both of two ranks, or on one; its culprit is replayed.

    `prepare` makes another layer of the right one first.
    """
    right = make_layer()
    if prepare is not None:
        prepare(right)
    golden = _read(right, range(ROWS))
    by_rank = []
    for rank in range(2):
        layer = deepcopy(right)
        broken = breaks if callable(breaks) else breaks.get(rank)
        if broken is not None:
            broken(layer)
        tap = _read(layer, range(2 * rank, 2 * rank + 2), spoil)
        shares = [(range(2 * rank, 2 * rank + 2), range(LENGTH))]
        by_rank.append(RankReadings(tap.readings, shares, frozenset(tap.silent)))
    known = Known(gradients={"expand.weight"}, loss_differs=True)
    search = find_origins(golden.readings, by_rank, {0: {}, 1: {}}, 1, torch.float64, known)
    direction = "forward" if "forward" in search.origins else "backward"
    origin = search.origins[direction]
    return _examine(right, search, origin, origin.culprit)


def _examine(right: Layer, search: Search, origin: Origin, name: str) -> Mistaken | None:
    call = _record(right, name)
    own = OwnModule(lambda: iter([call]), search.matched, (2,))
    inputs = DiagnosisInputs(search=search, own=lambda _: own)
    before = {name: value.clone() for name, value in right.state_dict().items()}
    attributes = dict(vars(right.mixer))
    found = examine("own_module", origin.tensor, inputs).explanation
    # Whatever was tried, the module is as it was: parameters, attributes, hooks.
    assert all(torch.equal(value, before[key]) for key, value in right.state_dict().items())
    assert vars(right.mixer) == attributes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in right.modules())
    if found is None:
        return None
    assert isinstance(found.operation, Mistaken)
    return found.operation


def _read(layer: Layer, rows: range, spoil: Callable[[Tensor], Tensor] | None = None) -> Tap:
    """Return what a layer computes of some rows and passes back from a gradient that has no pattern."""
    tap = Tap(layer, len(rows), LENGTH, scale=1.0, limit=1 << 30)
    x = draw(ROWS, LENGTH, WIDTH, seed=70)[rows.start : rows.stop].requires_grad_()
    if spoil is not None:
        layer.mixer.register_forward_hook(lambda m, args, out: (spoil(out[0]), out[1]))
    with tap.reading():
        layer(x).backward(_gradient()[rows.start : rows.stop])
    return tap


def _gradient() -> Tensor:
    return draw(ROWS, LENGTH, WIDTH, seed=71)


def _record(right: Layer, name: str) -> Call:
    module = dict(right.named_modules())[name]
    recorder = Recorder(module)
    x = draw(ROWS, LENGTH, WIDTH, seed=70).requires_grad_()
    right(x).backward(_gradient())
    recorder.close()
    return Call(right, name, module, recorder.args, recorder.named, recorder.gradients, nullcontext)


def only(found: Mistaken | None) -> Mistake:
    """Return the one mistake that was found."""
    assert found is not None
    (mistake,) = found.mistakes
    return mistake
