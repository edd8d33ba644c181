"""Which parts of a layout and a recipe go together: what no degree forbids and yet cannot be run."""

from __future__ import annotations

import json
from collections.abc import Iterator

from moeverify.case.degrees import own_model
from moeverify.case.rule import blame, experts, reading, reference_model, round_up
from moeverify.case.schema import Case, CustomModel
from moeverify.errors import Problem

_DATA = ("layout.data_parallel", "layout.dp_replicate", "layout.dp_shard")
_BYTES = {"bfloat16": 2, "float32": 4, "mixed": 2}
# The kernel that torch has for float32 pads the sums of its softmax to so many rows, and the ring does not expect it.
_PADDED_ROWS = 32
_MEGABLOCKS_BLOCK = 128  # rows of a block of megablocks' sparse matrices
_MEGABLOCKS_HAS = {
    "score": "softmax",
    "route_scale": 1.0,
    "num_groups": 1,
    "router_bias": False,
    "expert_bias": False,
    "shared_gate": False,
    "selection_bias_rate": 0.0,
    "idle_experts": 0,
}


@reading(*_DATA, "layout.tp", "layout.cp", "layout.parallelize")
def replicas(case: Case) -> Iterator[Problem]:
    """DDP holds the whole model on each rank."""
    layout = case.layout
    if layout.data_parallel != "ddp" or layout.parallelize is not None:
        return
    if layout.dp_shard > 1:
        ranks = layout.data_ranks
        remedy = f"write `dp_replicate: {ranks}` and no dp_shard, or `data_parallel: fsdp2`"
        yield blame("layout.dp_shard", f"ddp shards nothing, so dp_shard cannot be {layout.dp_shard}", remedy)
    if layout.tp > 1 and layout.data_ranks * layout.cp > 1:
        yield blame(
            "layout.data_parallel", "ddp together with tp is not supported", "write `data_parallel: fsdp2`"
        )


@reading(*_DATA, "layout.tp", "layout.cp", "layout.ep", "layout.etp", "layout.parallelize")
def first_fsdp(case: Case) -> Iterator[Problem]:
    """FSDP1 flattens parameters, so it composes with nothing but itself; tp alone does not need it."""
    layout = case.layout
    if layout.data_parallel != "fsdp1" or layout.parallelize is not None:
        return
    others = [name for name in ("cp", "ep") if getattr(layout, name) > 1]
    if layout.expert_tp not in (1, layout.tp):
        others.append("etp")
    if layout.tp > 1 and (layout.data_ranks > 1 or others):
        others.insert(0, "tp")
    if others:
        message = f"fsdp1 together with {' and '.join(others)} is not supported"
        yield blame("layout.data_parallel", message, "write `data_parallel: fsdp2`")


@reading("layout.sequence_parallel", "layout.loss_parallel", "layout.tp")
def tensor_parts(case: Case) -> Iterator[Problem]:
    """Sequence and loss parallelism are parts of tensor parallelism."""
    for name in ("sequence_parallel", "loss_parallel"):
        if getattr(case.layout, name) and case.layout.tp == 1:
            yield blame(f"layout.{name}", f"{name} needs tp above 1", f"set tp, or remove {name}")


@reading(*_DATA, "layout.cp", "layout.pp", "layout.experts", "layout.parallelize", "recipe.precision")
def mixed_precision(case: Case) -> Iterator[Problem]:
    """FSDP2 tells the dtype of the arithmetic from that of the parameters; your own function may too."""
    layout, path = case.layout, "recipe.precision"
    if case.recipe.precision != "mixed":
        return
    if layout.parallelize is None and layout.data_parallel != "fsdp2":
        message = f"mixed is a precision of fsdp2, and {layout.data_parallel} is another data parallelism"
        yield blame(path, message, "write `data_parallel: fsdp2`, or the precision float32 or bfloat16")
    elif layout.parallelize is None and layout.data_ranks * layout.cp == 1:
        message = "mixed is a precision of fsdp2, which needs more than one rank"
        yield blame(path, message, "set layout.dp_shard, or write the precision float32 or bfloat16")
    if layout.pp > 1:
        yield blame(path, "mixed together with pp is not supported", "write float32 or bfloat16")
    if layout.experts == "megablocks" and experts(case) is not None:
        message = "mixed together with megablocks' experts is not supported"
        yield blame(path, message, "write `experts: grouped_mm`, or the precision float32 or bfloat16")


@reading("layout.in_float32", "layout.parallelize", "recipe.precision")
def wide_modules(case: Case) -> Iterator[Problem]:
    """Only a function of the user's may leave modules in float32, and only where the rest is narrower."""
    path = "layout.in_float32"
    if not case.layout.in_float32:
        return
    if case.recipe.precision != "mixed":
        yield blame(path, f"in_float32 has no effect on the precision {case.recipe.precision}", "remove it")
    elif case.layout.parallelize is None:
        message = "no module of a built-in layout is left in float32"
        yield blame(path, message, "remove it, or divide the model by `parallelize`")


@reading("layout.experts", "recipe.precision", "recipe.model.moe")
def grouped_precision(case: Case) -> Iterator[Problem]:
    """The grouped matmul of torch has no float64."""
    if (
        case.layout.experts == "grouped_mm"
        and case.recipe.precision == "float64"
        and experts(case) is not None
    ):
        remedy = "write `experts: loop`, or set recipe.precision to float32 or bfloat16"
        yield blame("layout.experts", "grouped_mm cannot compute in float64", remedy)


@reading(
    *(f"layout.{name}" for name in ("cp", "context_parallel", "pp")),
    *(f"recipe.{name}" for name in ("precision", "data.seq_len", "model.mla")),
)
def torch_context(case: Case) -> Iterator[Problem]:
    """What the context parallelism of torch can do."""
    model = own_model(case)
    if model is None or case.layout.cp == 1 or case.layout.context_parallel != "torch":
        return
    path = "layout.context_parallel"
    if case.recipe.precision == "float64":
        remedy = "write `allgather`, or set recipe.precision to float32 or bfloat16"
        yield blame(path, "`torch` has no kernel in float64", remedy)
    unit = 2 * case.layout.cp * _PADDED_ROWS
    if case.recipe.precision == "float32" and case.recipe.data.seq_len % unit:
        message = (
            f"`torch` joins chunks of a multiple of {_PADDED_ROWS} positions in float32, two for each rank"
        )
        yield blame(path, message, f"set recipe.data.seq_len to a multiple of {unit}")
    if case.layout.pp > 1:
        yield blame(path, "`torch` is not built into pipelines here", "write `allgather`, or remove pp")
    if model.mla is not None:
        yield blame(path, "`torch` needs values as wide as the keys, and mla has others", "write `allgather`")


@reading(
    *(f"layout.{name}" for name in ("experts", "etp", "tp", "ep", "parallelize")),
    "recipe.precision",
    "recipe.model.hidden",
    "recipe.model.moe.expert_hidden",
)
def grouped_alignment(case: Case) -> Iterator[Problem]:
    """The grouped matmul of torch takes rows of a multiple of 16 bytes."""
    moe, model = experts(case), own_model(case)
    if (
        case.layout.experts != "grouped_mm"
        or moe is None
        or model is None
        or case.recipe.precision == "float64"
    ):
        return
    unit = 16 // _BYTES[case.recipe.precision]
    for name, value, shares in (
        ("model.hidden", model.hidden, 1),
        ("model.moe.expert_hidden", moe.expert_hidden, case.layout.expert_tp),
    ):
        if value % shares == 0 and (value // shares) % unit:
            per_rank = f" / etp {shares}" if shares > 1 else ""
            message = (
                f"grouped_mm needs rows of a multiple of 16 bytes, and recipe.{name} {value}{per_rank} is not"
            )
            remedy = f"set it to a multiple of {unit * shares}, such as {round_up(value, unit * shares)}"
            yield blame("layout.experts", message, remedy)


@reading(
    *(f"layout.{name}" for name in ("experts", "tp", "pp", "etp", "data_parallel", "parallelize")),
    "recipe.model",
    "recipe.model.moe",
)
def megablocks_parts(case: Case) -> Iterator[Problem]:
    """What megablocks' router and experts do not have, and what cannot divide them."""
    moe, layout, model = experts(case), case.layout, reference_model(case)
    if layout.experts != "megablocks" or moe is None or model is None:
        return
    if layout.parallelize is not None:
        yield blame(
            "layout.experts", "megablocks' experts cannot be divided by your own function", "remove one"
        )
    for name, degree in (("tp", layout.tp), ("pp", layout.pp), ("etp", layout.etp or 1)):
        if degree > 1:
            message = f"megablocks' experts together with {name} are not supported"
            yield blame(f"layout.{name}", message, f"remove {name}, or write `experts: loop`")
    if layout.data_parallel == "fsdp1":
        message = "fsdp1 together with megablocks' experts is not supported"
        yield blame("layout.data_parallel", message, "write `data_parallel: fsdp2`")
    for name, only in _MEGABLOCKS_HAS.items():
        if getattr(moe, name) != only:
            written = json.dumps(only).strip('"')
            message = f"megablocks has no {name} but {written}"
            remedy = f"set recipe.model.moe.{name} to {written}, or write `experts: loop`"
            yield blame("layout.experts", message, remedy)
    if moe.shared_hidden and model.mlp_bias:
        yield blame(
            "layout.experts", "megablocks' shared expert has no bias", "set recipe.model.mlp_bias to false"
        )
    if moe.num_experts * moe.expert_hidden < _MEGABLOCKS_BLOCK:
        message = f"megablocks needs num_experts x expert_hidden of {_MEGABLOCKS_BLOCK} at least"
        yield blame("layout.experts", message, "use more or larger experts")


@reading(
    *(f"layout.{name}" for name in ("experts", "data_parallel", "dp_shard", "cp", "ep")),
    "recipe.model.moe.num_experts",
)
def megablocks_shards(case: Case) -> Iterator[Problem]:
    """FSDP2 cuts the stacked experts along their rows; a shard must hold whole experts to have a logical place."""
    moe, layout = experts(case), case.layout
    if layout.experts != "megablocks" or moe is None or layout.data_parallel != "fsdp2":
        return
    shards = layout.dp_shard * layout.cp
    if moe.num_experts % shards:
        message = (
            f"recipe.model.moe.num_experts {moe.num_experts} does not give whole experts to {shards} shards"
        )
        yield blame("layout.experts", message, f"set it to a multiple of {shards}")


@reading(
    "layout.router_losses", "layout.experts", "layout.recompute", "recipe.data.min_valid", "recipe.model.moe"
)
def own_router_losses(case: Case) -> Iterator[Problem]:
    """Megablocks' own losses are means over the tokens of a rank, kept in a list of the process."""
    layout, path = case.layout, "layout.router_losses"
    if layout.router_losses == "global" or experts(case) is None:
        return
    if layout.experts != "megablocks":
        yield blame(path, "megablocks' own losses need its experts", "write `experts: megablocks`")
    if layout.recompute:
        yield blame("layout.recompute", "megablocks counts its losses again in a recomputation", "remove one")
    if case.recipe.data.min_valid < 1.0:
        message = "megablocks' own losses count padding too"
        yield blame(path, message, "set recipe.data.min_valid to 1.0")


@reading("layout.attention", "layout.cp", "layout.parallelize")
def fused_attention(case: Case) -> Iterator[Problem]:
    """The fused kernel sees no positions: it takes tokens for the whole row in its order."""
    if case.layout.attention == "fused" and (case.layout.cp > 1 or case.layout.parallelize is not None):
        message = "fused attention is for whole rows, without cp or a function of your own"
        yield blame("layout.attention", message, "write `plain`, or remove it")


@reading("checks.differs", "checks.because", "checks.skip")
def declared_differences(case: Case) -> Iterator[Problem]:
    """Who declares that something differs says why."""
    if bool(case.checks.differs) != bool(case.checks.because):
        yield blame("checks.differs", "`differs` and `because` go together", "say what differs, and why")
    for name in case.checks.differs:
        if name in case.checks.skip:
            yield blame("checks.differs", f"`{name}` cannot be both declared to differ and skipped")


@reading("layout.micro_batches", "recipe.model.moe.balance_scope", "recipe.model.moe.balance_coef")
def balance_of_parts(case: Case) -> Iterator[Problem]:
    """A balancing loss over the batch is no sum over its micro-batches, so no layout could be right."""
    moe = experts(case)
    if (
        moe is None
        or moe.balance_scope != "batch"
        or moe.balance_coef == 0.0
        or case.layout.micro_batches == 1
    ):
        return
    message = "with balance_scope `batch` the loss is not the sum over micro_batches"
    yield blame(
        "layout.micro_batches", message, "write 1, or set recipe.model.moe.balance_scope to `sequence`"
    )


@reading("layout.experts", "recipe.model")
def foreign_experts(case: Case) -> Iterator[Problem]:
    """The experts of a model that moeverify did not write are computed by its own code."""
    if isinstance(case.recipe.model, CustomModel) and case.layout.experts != "loop":
        message = f"experts `{case.layout.experts}` has no effect on a model with a `factory`"
        yield blame("layout.experts", message, "remove it; the factory chooses how experts are computed")


@reading("layout.cp", "layout.tp", "layout.ep", "layout.parallelize", "recipe.model")
def foreign_models(case: Case) -> Iterator[Problem]:
    """A model that moeverify did not write can only be replicated or sharded by parameter."""
    layout = case.layout
    if not isinstance(case.recipe.model, CustomModel) or layout.parallelize is not None:
        return
    for name in ("cp", "tp", "ep"):
        degree = getattr(layout, name)
        if degree > 1:
            message = f"{name} {degree} of a model with a `factory` needs your own function"
            yield blame(
                f"layout.{name}", message, 'write `parallelize: "package.module:function"`, or remove it'
            )


SUPPORT_RULES = (
    replicas,
    first_fsdp,
    tensor_parts,
    mixed_precision,
    wide_modules,
    grouped_precision,
    torch_context,
    grouped_alignment,
    megablocks_parts,
    megablocks_shards,
    own_router_losses,
    fused_attention,
    declared_differences,
    balance_of_parts,
    foreign_experts,
    foreign_models,
)
