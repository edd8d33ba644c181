"""Which checks there are, which kinds of logical tensors each looks at, and how exact each is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Metric = Literal["relative", "largest"]


@dataclass(frozen=True)
class Check:
    """A comparison with the golden.

    `exact` kinds must agree bit for bit whatever the tolerance. The metric is the relative error in the
    Frobenius norm, or the largest absolute difference of an element.
    """

    name: str
    kinds: tuple[str, ...]
    description: str
    exact: bool = False
    metric: Metric = "relative"


# In the order of a training step: what comes first is nearer to the cause.
CHECKS = (
    Check(
        "initial state", ("initial_weight", "initial_buffer"), "weights and buffers before step 0", exact=True
    ),
    Check(
        "routing",
        ("router_ids", "router_counts"),
        "which experts each token chose, and their counts",
        exact=True,
    ),
    Check(
        "routing flips",
        ("router_flips",),
        "score margin of the tokens that chose otherwise",
        metric="largest",
    ),
    Check("routing weights", ("router_weights",), "the weights that combine the experts' outputs"),
    Check("loss", ("token_loss", "loss"), "each token's cross entropy, and the losses of the batch"),
    Check("gradient", ("gradient",), "every parameter's gradient before the clip"),
    Check("gradient norm", ("gradient_norm",), "the global norm and the clip coefficient"),
    Check("update", ("update",), "every parameter's change by the step"),
    Check("optimizer state", ("optimizer_state",), "moments and step counters"),
    Check("buffers", ("buffer",), "the routers' selection bias"),
    Check("loaded", ("loaded",), "a loaded state against the one that was saved", exact=True),
)

# Checks that compare a run with itself or with its layout, and have their own code.
REPLICAS, COVERAGE, SHARDING, REPEAT, TRACE = "replicas", "coverage", "sharding", "repeat", "trace"
PRECISION = "precision"
# Of a checkpoint: the identity of each expert, and the steps after a load under the layout that saved.
EXPERTS, RESUMED = "experts", "resumed"
OWN_CHECKS = (REPLICAS, COVERAGE, SHARDING, REPEAT, TRACE, PRECISION, EXPERTS, RESUMED)

# In goldens for other uses: forced steps (an update says the same more sharply), replayed routing.
UNCOMPARED_KINDS = frozenset({"weight", "router_margin"})

# Kinds of which the golden is zero by definition.
ZERO_KINDS = frozenset({"router_flips"})

KIND_ORDER = {kind: number for number, check in enumerate(CHECKS) for kind in check.kinds}


def check_of(kind: str) -> Check:
    """Return the check that looks at a kind."""
    return next(check for check in CHECKS if kind in check.kinds)
