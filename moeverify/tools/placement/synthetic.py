"""Seeded synthetic traces, for benchmarks and tests of the solvers.

Notation: T steps, L MoE layers, E experts, R source ranks.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from moeverify.tools.placement.load_trace import LoadTrace, TraceHeader
from moeverify.tools.placement.sharing import FloatArray

Kind = Literal["uniform", "zipf", "groups", "drifting"]
KINDS: tuple[Kind, ...] = ("uniform", "zipf", "groups", "drifting")

_ZIPF_EXPONENT = 1.2
_NUM_GROUPS = 8
_NUM_HOT_GROUPS = 2
_HOT_FACTOR = 6.0  # of the experts in a hot group


def make_trace(
    kind: Kind,
    *,
    seed: int,
    num_layers: int = 1,
    num_experts: int = 64,
    num_sources: int = 1,
    num_steps: int = 1,
    copies_per_step: int = 1 << 18,
    source_skew: float = 0.0,
) -> LoadTrace:
    """Return a trace in which every layer draws `copies_per_step` token copies per step.

    - `uniform`: all experts are equally likely.
    - `zipf`: the n-th most likely expert has a probability proportional to n^-1.2, in a different order in
      each layer.
    - `groups`: of 8 groups of consecutive experts, 2 are 6 times as likely.
    - `drifting`: interpolates from one Zipf order in the first step to another in the last.

    `source_skew` is the standard deviation of the logarithm of each source's preferences; 0 makes all
    sources alike.
    """
    random = np.random.default_rng([seed, KINDS.index(kind)])
    start = _draw_popularity(kind, num_layers, num_experts, random)
    stop = _draw_popularity(kind, num_layers, num_experts, random) if kind == "drifting" else start
    taste = np.exp(source_skew * random.standard_normal((num_layers, num_sources, num_experts)))
    per_source = _divide(copies_per_step, num_sources)
    steps = []
    for step in range(num_steps):
        part = step / max(num_steps - 1, 1)
        likely = ((1 - part) * start + part * stop)[:, None, :] * taste
        likely /= likely.sum(-1, keepdims=True)
        steps.append(random.multinomial(per_source, likely).transpose(0, 2, 1))
    header = TraceHeader(tuple(range(num_layers)), num_experts, num_sources, model=f"synthetic {kind}")
    return LoadTrace(header, tuple(range(num_steps)), np.stack(steps))


def _draw_popularity(
    kind: Kind, num_layers: int, num_experts: int, random: np.random.Generator
) -> FloatArray:
    """Return the probability of each expert (L, E)."""
    if kind == "uniform":
        likely = np.ones((num_layers, num_experts))
    elif kind == "groups":
        likely = np.exp(0.5 * random.standard_normal((num_layers, num_experts)))
        group = np.arange(num_experts) * _NUM_GROUPS // num_experts
        for layer in range(num_layers):
            hot = random.choice(_NUM_GROUPS, _NUM_HOT_GROUPS, replace=False)
            likely[layer, np.isin(group, hot)] *= _HOT_FACTOR
    else:
        zipf = np.arange(1, num_experts + 1) ** -_ZIPF_EXPONENT
        likely = np.stack([random.permutation(zipf) for _ in range(num_layers)])
    result: FloatArray = likely / likely.sum(-1, keepdims=True)
    return result


def _divide(total: int, parts: int) -> np.typing.NDArray[np.int64]:
    """Return `total` in equal integer parts, the first ones larger by one."""
    return total // parts + (np.arange(parts) < total % parts).astype(np.int64)
