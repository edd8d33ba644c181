"""Parts of tensors in words: `lm of dp 0, micro-batch 1`."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.report.numbers import format_range
from moeverify.results.part import Block, Contribution, Group, Part, Tokens

WHOLE_NAME = "golden"
_MOST = 4


def name_part(part: Part) -> str:
    """Return the name of a part; the whole is called `golden`."""
    names = [part.term] if part.term else []
    names += [name_tokens(part.tokens)] if part.tokens is not None else []
    names += [name_group(part.group)] if part.group is not None else []
    return " of ".join(names) or WHOLE_NAME


_PLURALS = {"index": "indices"}


def name_group(group: Group) -> str:
    """Return a group of parameters in words: `the 3 parameters replicated over tp`."""
    count = len(group.tensors)
    if group.axis:
        plural = "s" if count > 1 else ""
        return f"the {count} parameter{plural} {group.placement} over {group.axis}"
    if group.is_outside:
        return f"the {count} parameters outside {group.family}s"
    if group.family:
        return f"the {count} {group.family} parameters"
    return group.tensors[0] if count == 1 else f"{group.tensors[0]} and {count - 1} of its kind"


def name_tokens(tokens: Tokens) -> str:
    """Return a set of tokens in words: `dp 0, cp 1, micro-batch 2`."""
    names = [f"dp {tokens.data_rank}"] if tokens.data_rank is not None else []
    names += [f"cp {tokens.context_rank}"] if tokens.context_rank is not None else []
    names += [f"micro-batch {tokens.micro_batch}"] if tokens.micro_batch is not None else []
    return ", ".join(names) or "the whole batch"


def name_block(block: Block) -> str:
    """Return indices of a dim in words: `rows 0-3 of dim 0`."""
    plural = _PLURALS.get(block.unit, f"{block.unit}s")
    return f"{block.unit if len(block.indices) == 1 else plural} {format_range(block.indices)} of dim {block.dim}"


def name_some(names: Sequence[str]) -> str:
    """Return the first names, and the number of others."""
    left_out = len(names) - _MOST
    return "; ".join(names[:_MOST]) + (f"; and {left_out} more" if left_out > 0 else "")


def name_contributions(contributions: Sequence[Contribution]) -> dict[str, float]:
    """Return the coefficients, keyed by the names of their parts."""
    return {name_part(each.part): each.factor.value for each in contributions}
