"""What must divide what: the sizes of a model and a batch, and the degrees of a layout.

With `parallelize` the user's own code divides the model, so only the data and the mesh are judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from moeverify.case.rule import Rule, blame, experts, reading, reference_model, round_up
from moeverify.case.schema import Case, ReferenceModel
from moeverify.errors import Problem

_DATA_AXES = ("layout.dp_replicate", "layout.dp_shard")
# What decides whether the model is ours to divide, and whether it has experts.
_MODEL = (
    "layout.parallelize",
    "recipe.model.moe",
    "recipe.model.num_layers",
    "recipe.model.num_dense_layers",
)


def own_model(case: Case) -> ReferenceModel | None:
    """Return the reference model if the layout is one that moeverify applies."""
    return None if case.layout.parallelize is not None else reference_model(case)


@reading(*_DATA_AXES, "layout.micro_batches", "recipe.data.batch")
def batch(case: Case) -> Iterator[Problem]:
    """Every rank gets the same number of rows in every micro-batch."""
    rows, layout = case.recipe.data.batch, case.layout
    divisor = layout.data_ranks * layout.micro_batches
    if rows % divisor:
        parts = {
            "dp_replicate": layout.dp_replicate,
            "dp_shard": layout.dp_shard,
            "micro_batches": layout.micro_batches,
        }
        product = " x ".join(f"{name} {value}" for name, value in parts.items() if value > 1)
        path = next(f"layout.{name}" for name, value in parts.items() if value > 1)
        remedy = f"set recipe.data.batch to a multiple of {divisor}, such as {round_up(rows, divisor)}"
        yield blame(path, f"recipe.data.batch {rows} is not divisible by {product}", remedy)


def _divides(degree: str, size: str, what: str) -> Rule:
    """Return the rule that the degree `degree` divides the model's `size`, where the model has `what`."""
    section, _, name = size.rpartition(".")

    @reading(f"layout.{degree}", "layout.tp", "layout.ep", f"recipe.{size}", *_MODEL)
    def rule(case: Case) -> Iterator[Problem]:
        model = own_model(case)
        if model is None or (section == "model.moe" and experts(case) is None):
            return
        if name == "ffn_hidden" and model.num_dense_layers == 0 and model.moe is not None:
            return
        value = getattr(experts(case) if section == "model.moe" else model, name)
        written = "tp" if degree == "etp" and case.layout.etp is None else degree
        divisor = case.layout.expert_tp if degree == "etp" else getattr(case.layout, degree)
        if value % divisor:
            message = f"recipe.{size} {value} ({what}) is not divisible by {written} {divisor}"
            multiple = round_up(value, divisor)
            remedy = f"set it to a multiple of {divisor}, such as {multiple}, or change {written}"
            yield blame(f"layout.{written}", message, remedy)

    return rule


DIVISIONS = (
    _divides("tp", "model.num_heads", "attention heads"),
    _divides("tp", "model.num_kv_heads", "key and value heads"),
    _divides("tp", "model.ffn_hidden", "the width of a dense MLP"),
    _divides("tp", "model.moe.shared_hidden", "the width of the shared expert"),
    _divides("tp", "model.vocab_size", "rows of the embedding and the head"),
    _divides("etp", "model.moe.expert_hidden", "the width of an expert"),
    _divides("ep", "model.moe.num_experts", "experts"),
)


@reading("layout.ep", "layout.etp", "layout.tp", *_MODEL)
def expert_axes(case: Case) -> Iterator[Problem]:
    """Experts are divided by ep, by etp, or by neither, and only if there are some."""
    layout = case.layout
    if own_model(case) is None or experts(case) is not None:
        return
    for name, value in (("ep", layout.ep), ("etp", layout.etp or 1)):
        if value > 1:
            message = f"{name} {value} needs a model with experts"
            yield blame(f"layout.{name}", message, f"remove {name}, or choose a preset with `moe`")


@reading("layout.ep", "layout.etp", "layout.tp", "layout.cp", "layout.data_parallel", *_DATA_AXES)
def borrowed_ranks(case: Case) -> Iterator[Problem]:
    """Expert parallelism adds no ranks: it regroups those of other axes."""
    layout = case.layout
    asked = layout.ep * layout.expert_tp
    if layout.expert_mesh_size % asked == 0:
        return
    lenders = {"dp_replicate": layout.dp_replicate} if layout.data_parallel == "ddp" else {}
    lenders |= {"dp_shard": layout.dp_shard, "cp": layout.cp, "tp": layout.tp}
    product = " x ".join(f"{name} {value}" for name, value in lenders.items())
    names = [name for name, value in (("ep", layout.ep), ("etp", layout.expert_tp)) if value > 1]
    wanted = " x ".join(f"{name} {layout.ep if name == 'ep' else layout.expert_tp}" for name in names)
    verb = "do" if len(names) > 1 else "does"
    message = (
        f"{wanted} {verb} not divide the {layout.expert_mesh_size} ranks that experts borrow ({product})"
    )
    left = layout.expert_mesh_size // math.gcd(
        layout.expert_mesh_size, layout.expert_tp if "ep" in names else 1
    )
    remedy = f"write a divisor of {left}, or raise one of {', '.join(lenders)}"
    yield blame(f"layout.{names[0]}", message, remedy)


@reading("layout.cp", "layout.context_parallel", "recipe.data.seq_len", "layout.parallelize")
def context(case: Case) -> Iterator[Problem]:
    """Each context rank holds an equal share of every row."""
    length, pieces = case.recipe.data.seq_len, _context_pieces(case)
    if own_model(case) is not None and length % pieces:
        why = "cp" if case.layout.context_parallel == "alltoall" else "2 x cp, for the zigzag split"
        remedy = f"set recipe.data.seq_len to a multiple of {pieces}, such as {round_up(length, pieces)}"
        yield blame("layout.cp", f"recipe.data.seq_len {length} is not divisible by {pieces} ({why})", remedy)


@reading(
    *(f"layout.{name}" for name in ("cp", "tp", "ep", "etp", "context_parallel", "sequence_parallel")),
    "recipe.data.seq_len",
    *_MODEL,
)
def sequence(case: Case) -> Iterator[Problem]:
    """Each tensor rank takes an equal part of the positions, where it takes a part of them."""
    layout, length, pieces = case.layout, case.recipe.data.seq_len, _context_pieces(case)
    is_shared_out = experts(case) is not None and layout.slices_tokens
    if own_model(case) is None or length % pieces or not (layout.sequence_parallel or is_shared_out):
        return
    share = length // layout.cp
    if share % layout.tp:
        path = "layout.sequence_parallel" if layout.sequence_parallel else "layout.tp"
        why = "sequence_parallel" if layout.sequence_parallel else f"etp {layout.expert_tp}"
        per_rank = f" / cp {layout.cp}" if layout.cp > 1 else ""
        message = f"recipe.data.seq_len {length}{per_rank} is not divisible by tp {layout.tp}, as {why} needs"
        unit = math.lcm(pieces, layout.cp * layout.tp)
        remedy = f"set recipe.data.seq_len to a multiple of {unit}, such as {round_up(length, unit)}"
        yield blame(path, message, remedy)


def _context_pieces(case: Case) -> int:
    """Return into how many pieces context parallelism cuts a row: in zigzag, two for each rank."""
    layout = case.layout
    return 2 * layout.cp if layout.cp > 1 and layout.context_parallel != "alltoall" else layout.cp


@reading(
    "layout.cp", "layout.tp", "layout.context_parallel", "recipe.model.num_heads", "recipe.model.num_kv_heads"
)
def heads_over_context(case: Case) -> Iterator[Problem]:
    """With all-to-all each context rank takes whole heads."""
    model, layout = own_model(case), case.layout
    if model is None or layout.cp == 1 or layout.context_parallel != "alltoall":
        return
    for name in ("num_heads", "num_kv_heads"):
        value = getattr(model, name)
        if value % layout.tp == 0 and (value // layout.tp) % layout.cp:
            over = f"{name} {value}" + (f" / tp {layout.tp}" if layout.tp > 1 else "")
            message = f"{over} is not divisible by cp {layout.cp}, as context_parallel `alltoall` needs"
            yield blame("layout.context_parallel", message, "write `allgather`, or change cp")


DEGREE_RULES = (batch, *DIVISIONS, expert_axes, borrowed_ranks, context, sequence, heads_over_context)
