"""Hypothesis: gradients are right, and the reported loss is another average of the right losses of the tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

from moeverify.diagnose.factors import find_factor
from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome
from moeverify.diagnose.inputs import LM, DiagnosisInputs
from moeverify.diagnose.token_groups import CHUNKS, Fields, Groups, TokenMap
from moeverify.diagnose.token_weights import GROUPS, drop_alike, list_counts, list_sources
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.checks import Kind
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.factor import Factor, Product, Source
from moeverify.results.observation import ScalarValues
from moeverify.results.token_weights import Averaging, Reaveraged, TokenCount, TokenSet
from moeverify.results.trial import Reason

_EXACT = 1e-10
"""Relative: thousands of averages are tried, and their values lie in about one decade."""

_SIZES = tuple(1 << power for power in range(1, 15))

Candidate = tuple[int, Averaging, Tensor]
"""How complex it is, the average, and what each rank reports by it (number of ranks)."""


class ReportedAverage(Hypothesis):
    """The number is a sum of the tokens' losses by other weights, the same on all ranks, or by each rank's tokens."""

    name = "reported_average"
    quantities = frozenset({Quantity.LOSS})

    def applies(self, tensor: WrongTensor, inputs: DiagnosisInputs) -> bool:
        """Return whether it is the reported loss of the tokens."""
        return super().applies(tensor, inputs) and tensor.key[1:] == (Kind.LOSS, LM)

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Compute the averages of the golden's losses of the tokens."""
        (tensor,) = tensors
        losses = inputs.golden(Kind.TOKEN_LOSS, LM, 0)
        if losses is None or inputs.valid is None or tensor.precision != torch.float64:
            return self.untried(Reason.NOT_COMPARABLE)
        fields = Fields.of((losses.shape[0], losses.shape[1]), inputs.micro_batches)
        worst = tensor.worst_shard
        actual = torch.tensor([float(shard.values()) for shard in tensor.shards], dtype=torch.float64)
        seen = ScalarValues(expected=float(tensor.expected), actual=float(worst.values()), rank=worst.rank)
        sources = list_sources(inputs)
        factor = find_factor(seen.actual / seen.expected, sources) if seen.expected else Factor(value=0.0)
        if fields is None or factor.equals:
            return self.refuse(seen)
        ranks = [shard.rank for shard in tensor.shards]
        found = self._find(
            TokenMap(fields, inputs.valid), losses.to("cpu", torch.float64), actual, ranks, inputs
        )
        if not found:
            return self.refuse(seen)
        operation = Reaveraged(averagings=found, is_reported=True)
        subject = Subject(quantity=Quantity.LOSS, tensors=(LM,))
        return self.accept(Explanation(cause=Cause.METRIC, subject=subject, operation=operation), seen)

    def _find(
        self, tokens: TokenMap, losses: Tensor, actual: Tensor, ranks: Sequence[int], inputs: DiagnosisInputs
    ) -> tuple[Averaging, ...]:
        fits = [
            (cost, averaging)
            for cost, averaging, values in (
                *_list_of_groups(tokens, losses, ranks, inputs),
                *_list_of_all(tokens, losses, len(ranks), inputs.axes.sources),
            )
            if bool(((values - actual).abs() <= _EXACT * actual.abs()).all())
        ]
        least = min((cost for cost, _ in fits), default=0)
        simplest = dict.fromkeys(averaging for cost, averaging in fits if cost == least)
        return tuple(simplest) if len(simplest) <= 3 else ()


def _list_of_groups(
    tokens: TokenMap, losses: Tensor, ranks: Sequence[int], inputs: DiagnosisInputs
) -> Iterator[Candidate]:
    """Yield the losses of one group of tokens alone: of one rank, micro-batch or row, or of each rank's own."""
    total, losses = float(tokens.counted.sum()), losses * tokens.counted
    everything = torch.ones_like(tokens.counted)
    own: dict[int, tuple[int, int]] = {
        rank: (int(share[0][0][0]), int(share[0][1][0])) for rank, share in inputs.micro_batches.items()
    }
    for groups in tokens.basic[1:]:
        sums, valid, size = groups.sums(losses), groups.sums(tokens.counted), groups.sums(everything)
        count = TokenCount(of="valid", groups=groups.name)
        ways = [
            (0, count, valid),
            (1, None, torch.full_like(valid, total)),
            (2, TokenCount(of="all", groups=groups.name), size),
        ]
        for cost, over, under in ways:
            values = sums / under
            for number in range(len(values)):
                only = TokenSet(groups=groups.name, which="numbers", numbers=(number,))
                yield cost, Averaging(over=over, only=only), values[number].expand(len(ranks))
            if groups.name.unit == "rank":
                at = [int(groups.ids[own[rank]]) for rank in ranks]
                only = TokenSet(groups=groups.name, which="own")
                yield cost, Averaging(over=over, only=only), values[at]


def _list_of_all(
    tokens: TokenMap, losses: Tensor, num_ranks: int, sources: Sequence[Source]
) -> Iterator[Candidate]:
    """Yield the averages of all tokens."""
    counted, total = tokens.counted, float(tokens.counted.sum())
    sizes = [size for size in _SIZES if size < int(tokens.lengths.max())]
    chunks = [tokens.chunk(unit, size) for unit in CHUNKS for size in sizes]
    of_basic = ((each, field, 1) for groups in tokens.basic for each, field in list_counts(tokens, groups))
    of_chunks = ((each, field, 2) for groups in chunks for each, field in tokens.list_counts(groups))
    basic, others = drop_alike(of_basic, counted), drop_alike(of_chunks, counted)
    known = {groups.name: groups for groups in (*tokens.basic, *chunks)}
    some = losses[counted]
    for over, under, cost in (*basic, *others):
        for factor, more in _list_factors(known[over.groups], counted, sources):
            value = float((some / under[counted]).sum()) * (1.0 if factor is None else factor.value)
            yield cost + more, Averaging(over=over, factor=factor), torch.full((num_ranks,), value)
    for times, field, cost in basic:
        value, mean = float((some * field[counted]).sum()) / total, float(field[counted].mean())
        for factor in (None, Factor(value=1.0 / mean)):
            scaled = value * (1.0 if factor is None else factor.value)
            yield cost + 4, Averaging(times=times, factor=factor), torch.full((num_ranks,), scaled)
    for (over, under, cost), (times, field, _) in product((*basic, *others), basic):
        value = float((some * field[counted] / under[counted]).sum()) / total
        yield cost + 8, Averaging(over=over, times=times), torch.full((num_ranks,), value)


def _list_factors(
    groups: Groups, counted: Tensor, sources: Sequence[Source]
) -> Iterator[tuple[Factor | None, int]]:
    yield None, 0
    count = len(torch.unique(groups.ids[counted]))
    if count > 1:
        yield Factor(value=1.0 / count, equals=(Product(over=(GROUPS,)),)), 0
    for size in {source.size for source in sources} - {1, count}:
        alike = tuple(Product(over=(source.name,)) for source in sources if source.size == size)
        yield Factor(value=1.0 / size, equals=alike), 3


HYPOTHESIS = ReportedAverage()
