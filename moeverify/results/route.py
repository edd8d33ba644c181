"""One batch on its way through a MoE layer: which token goes where, and what came of it. No torch."""

from __future__ import annotations

from moeverify.results.record import Record


class Choice(Record):
    """One expert that a token has chosen: its combine weight, and the rank that computed it, None where none did."""

    expert: int
    weight: float
    rank: int | None


class TokenRoute(Record):
    """One token: its rank, its row and position in the global batch, its id, and its experts, best first.

    `norm` is that of its hidden vector before the layer, `combined_norm` that of the sum of its experts' weighted
    outputs. Padding is routed as every token is.
    """

    rank: int
    row: int
    position: int
    token: int
    is_padding: bool
    choices: tuple[Choice, ...]
    norm: float
    combined_norm: float


class CombineCheck(Record):
    """The largest difference of a combined output from the weighted sum of its experts' outputs, and its bound.

    Both are those of the element that uses most of its bound, over `num_tokens` tokens.
    """

    num_tokens: int
    error: float
    bound: float

    @property
    def is_right(self) -> bool:
        """Return whether all elements are within their bounds."""
        return self.error <= self.bound


class RouteResult(Record):
    """What one batch did in a MoE layer.

    `tokens` are some of each rank's. `sent[r][s]` copies of rank r's tokens were computed on rank s; `computed` has,
    by rank, how many copies each of its experts computed. Of all copies that were chosen, `num_lost` came to no rank;
    `num_surplus` were computed that nobody had chosen. `combine` is None where a rank has parts of experts.
    Shapes: sent (num_ranks, num_ranks).
    """

    layer: int
    step: int
    num_experts: int
    top_k: int
    num_tokens: int
    num_padding: int
    tokens: tuple[TokenRoute, ...]
    sent: tuple[tuple[int, ...], ...]
    computed: tuple[dict[int, int], ...]
    hosts: tuple[str, ...] = ()
    num_lost: int = 0
    num_surplus: int = 0
    combine: CombineCheck | None = None

    @property
    def num_copies(self) -> int:
        """Return how many copies were chosen."""
        return self.num_tokens * self.top_k

    @property
    def is_right(self) -> bool:
        """Return whether each copy was computed once, by the expert that was chosen, and combined with its weight."""
        combined = self.combine is None or self.combine.is_right
        return not self.num_lost and not self.num_surplus and combined


class RouteReport(Record):
    """What became of one case: its result, or why there is none."""

    case: str
    ranks: int
    recipe: str = ""
    layout: str = ""
    result: RouteResult | None = None
    reason: str = ""
