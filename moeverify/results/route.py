"""Routing of one batch through a MoE layer, and its result. No torch."""

from __future__ import annotations

from moeverify.results.record import Record


class Choice(Record):
    """One expert that a token chose: its combine weight, and the rank that computed it, or None."""

    expert: int
    weight: float
    rank: int | None


class TokenRoute(Record):
    """One token: its rank, its row and position in the global batch, its id, and its experts, best first.

    `norm` is the norm of the hidden vector before the layer. `combined_norm` is the norm of the weighted
    sum of the expert outputs. Padding tokens are routed like all others.
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
    """The largest error of combined outputs against the weighted sums of expert outputs, and its bound.

    Both values belong to the element that uses most of its bound, over `num_tokens` tokens.
    """

    num_tokens: int
    error: float
    bound: float

    @property
    def is_right(self) -> bool:
        """Return whether all elements are within their bounds."""
        return self.error <= self.bound


class RouteResult(Record):
    """The routing of one batch in a MoE layer.

    `tokens` are samples from each rank. `sent[r][s]` copies of rank r's tokens were computed on rank s.
    `computed` has, per rank, the number of copies that each of its experts computed. `num_lost` chosen
    copies reached no rank. `num_surplus` copies were computed although no token chose them. `combine` is
    None if experts are split over ranks. Shape: sent (num_ranks, num_ranks).
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
        """Return the number of chosen copies."""
        return self.num_tokens * self.top_k

    @property
    def is_right(self) -> bool:
        """Return whether each copy was computed once by its chosen expert and combined with its weight."""
        combined = self.combine is None or self.combine.is_right
        return not self.num_lost and not self.num_surplus and combined


class RouteReport(Record):
    """The outcome of one case: its result, or the reason why there is none."""

    case: str
    ranks: int
    recipe: str = ""
    layout: str = ""
    result: RouteResult | None = None
    reason: str = ""
