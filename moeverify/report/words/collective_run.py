"""Descriptions of collectives, and of the calls of torch.distributed that run them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from moeverify.results.collective_name import CollectiveName
from moeverify.results.collective_run import Transfer


class CollectiveWords(NamedTuple):
    """Description of a collective and its backward pass, and the calls used for both."""

    meaning: str
    call: str
    backward: str
    backward_call: str
    advice: str = ""


_SAME = "If all ranks compute the same from the output, each has the whole gradient: "

_WORDS: Mapping[CollectiveName, CollectiveWords] = {
    CollectiveName.ALL_TO_ALL: CollectiveWords(
        "rank s gets part s of every rank's input, in the order of the ranks",
        "dist.all_to_all_single(output, input, output_split_sizes=receives, input_split_sizes=sends)",
        "the same exchange with the two sizes swapped: each gradient goes back to where its element came from",
        "dist.all_to_all_single(grad_input, grad_output, output_split_sizes=sends, input_split_sizes=receives)",
    ),
    CollectiveName.ALL_GATHER: CollectiveWords(
        "every rank gets the inputs of all ranks, in the order of the ranks",
        "dist.all_gather_into_tensor(output, input)",
        "a reduce_scatter: the gradients that all ranks have of a part are summed on the rank that gave it",
        "dist.reduce_scatter_tensor(grad_input, grad_output)",
        _SAME + "its slice is right, the sum n times too large.",
    ),
    CollectiveName.REDUCE_SCATTER: CollectiveWords(
        "rank s gets the sum over all ranks of part s of their inputs",
        "dist.reduce_scatter_tensor(output, input)",
        "an all_gather: each rank's gradient of part s is the one that rank s has of the sum",
        "dist.all_gather_into_tensor(grad_input, grad_output)",
    ),
    CollectiveName.ALL_REDUCE: CollectiveWords(
        "every rank gets the sum of all inputs",
        "dist.all_reduce(tensor)",
        "an all_reduce: an input is in the sum of every rank, so its gradient is the sum of all",
        "dist.all_reduce(grad)",
        _SAME + "it passes as it is, the sum is n times too large.",
    ),
    CollectiveName.BROADCAST: CollectiveWords(
        "every rank gets the input of rank {source}",
        "dist.broadcast(tensor, src={source})",
        "a reduce: the gradients of all ranks are summed on rank {source}; the other inputs were not used",
        "dist.reduce(grad, dst={source})",
    ),
}


def describe_collective(transfer: Transfer) -> CollectiveWords:
    """Return the description of a transfer's collective."""
    return CollectiveWords(*(text.format(source=transfer.source) for text in _WORDS[transfer.collective]))


def describe_padding(transfer: Transfer) -> str:
    """Return a note if parts were padded, else an empty string."""
    if not transfer.padded_to:
        return ""
    return (
        f"This collective takes parts of one size: each is padded to {transfer.padded_to} elements before, as FSDP2"
        " pads its shards, and cut off after."
    )
