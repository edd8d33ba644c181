"""The placement of experts on the ranks of ep: `layout.placement` for a model, and its rules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moeverify.cases.rule import MODEL_OF_LAYOUT, blame, experts, own_model, reading
from moeverify.cases.schema import Case, ExpertMatrix, Layout, ReferenceModel
from moeverify.cases.suggest import enumerate_names
from moeverify.errors import Problem
from moeverify.tools.placement.placement import STRATEGIES, Placement, check_matrix
from moeverify.tools.placement.placement_file import FILE_ENDINGS

FIELD, EXCHANGE, REBALANCE = "layout.placement", "layout.exchange", "layout.rebalance"

Given = str | ExpertMatrix | dict[str, ExpertMatrix]


def list_moe_layers(model: ReferenceModel) -> tuple[int, ...]:
    """Return the indices of the blocks that have experts."""
    return tuple(range(model.num_dense_layers, model.num_layers)) if model.moe is not None else ()


def find_placement(layout: Layout, model: ReferenceModel) -> Placement | None:
    """Return the initial placement of experts on ep in each MoE layer, or None without a placement.

    The layout must have been validated.
    """
    if not is_placed(layout):
        return None
    return spell_out("blocks" if layout.placement is None else layout.placement, layout.ep, model)


def list_exchanges(layout: Layout, model: ReferenceModel) -> dict[int, Placement]:
    """Return the placements that experts move to during training, by the number of completed steps."""
    return {int(after): spell_out(given, layout.ep, model) for after, given in layout.exchange.items()}


def spell_out(given: Given, num_ranks: int, model: ReferenceModel) -> Placement:
    """Return the value of a placement field as a placement with a matrix for each MoE layer."""
    assert model.moe is not None
    layers, num_experts = list_moe_layers(model), model.moe.num_experts
    if isinstance(given, str):
        return STRATEGIES[given](num_experts, num_ranks, layers)
    if isinstance(given, dict):
        return Placement(num_experts, tuple(given[str(layer)] for layer in layers), layers)
    return Placement(num_experts, (given,) * len(layers), layers)


def is_placed(layout: Layout) -> bool:
    """Return whether a layout defines the location of experts, instead of fixed equal blocks."""
    return layout.placement is not None or bool(layout.exchange) or layout.rebalance is not None


@reading(
    "layout.ep", FIELD, EXCHANGE, REBALANCE, "recipe.steps", "recipe.model.moe.num_experts", *MODEL_OF_LAYOUT
)
def fitting_placement(case: Case) -> Iterator[Problem]:
    """A placement contains every expert of the model and has one row for each rank of ep."""
    layout, model = case.layout, own_model(case)
    if not is_placed(layout):
        return
    field, name = _find_field(layout)
    if model is None or experts(case) is None:
        remedy = "remove it, or use a model with `moe`"
        yield blame(field, f"{name} needs experts that moeverify divides", remedy)
    elif layout.ep == 1:
        yield blame(field, f"{name} needs ep above 1", "set ep to the number of its rows, or remove it")
    else:
        if layout.placement is not None:
            yield from check_given(layout.placement, FIELD, layout.ep, model)
        for after, given in layout.exchange.items():
            yield from _check_after(after, case.recipe.steps)
            yield from check_given(given, f"{EXCHANGE}.{after}", layout.ep, model)
        yield from _check_rebalance(layout, case.recipe.steps, model)


def _check_rebalance(layout: Layout, num_steps: int, model: ReferenceModel) -> Iterator[Problem]:
    """Yield the problems that prevent solving placements from the load of the run."""
    spec = layout.rebalance
    if spec is None:
        return
    assert model.moe is not None
    if layout.exchange:
        message = "the placements are given by exchange, and would be solved by rebalance as well"
        yield blame(REBALANCE, message, "remove one of them")
    if spec.every >= num_steps:
        message = (
            f"the first new placement would come after {spec.every} steps, and the recipe trains {num_steps}"
        )
        yield blame(f"{REBALANCE}.every", message, f"write at most {num_steps - 1}, or set recipe.steps")
    num_experts = model.moe.num_experts
    least = -(-num_experts // layout.ep)
    if spec.slots < least:
        held = f"{layout.ep} ranks with {spec.slots} slots each hold {layout.ep * spec.slots} experts"
        message = f"{held}, and the model has {num_experts}"
        yield blame(f"{REBALANCE}.slots", message, f"write at least {least}, or a larger ep")
    most = max((len(row) for row in _list_rows(layout.placement)), default=0)
    if spec.slots < most:
        message = f"a rank holds {most} experts at first, and there are {spec.slots} slots"
        yield blame(f"{REBALANCE}.slots", message, f"write at least {most}, or another placement")


def _list_rows(given: Given | None) -> Iterator[Sequence[int]]:
    """Yield the rows of all given matrices; a named strategy yields none, because it always fits."""
    if isinstance(given, str) or given is None:
        return
    for matrix in given.values() if isinstance(given, dict) else (given,):
        yield from matrix


def _find_field(layout: Layout) -> tuple[str, str]:
    """Return the path and the name of the field to blame for placed experts."""
    written = {FIELD: layout.placement is not None, EXCHANGE: bool(layout.exchange), REBALANCE: True}
    field = next(field for field, is_written in written.items() if is_written)
    return field, field.removeprefix("layout.")


def _check_after(after: str, num_steps: int) -> Iterator[Problem]:
    if num_steps < 2:
        message = f"an exchange is between two steps, and the recipe trains {num_steps}"
        yield blame(f"{EXCHANGE}.{after}", message, "set recipe.steps to 2 or more, or remove exchange")
    elif after not in map(str, range(1, num_steps)):
        message = f"expected a number of steps from 1 to {num_steps - 1}, got `{after}`"
        remedy = f"the recipe trains {num_steps} steps, and a move after the last one has no effect"
        yield blame(f"{EXCHANGE}.{after}", message, remedy)


def check_given(given: Given, path: str, num_ranks: int, model: ReferenceModel) -> Iterator[Problem]:
    """Yield the problems of the placement given by the field at `path`."""
    assert model.moe is not None
    layers, num_experts = list_moe_layers(model), model.moe.num_experts
    if isinstance(given, str):
        # A file that could not be read keeps its name here, and has been reported already.
        if given not in STRATEGIES and not given.endswith(FILE_ENDINGS):
            remedy = (
                f"write {enumerate_names(list(STRATEGIES))}, a matrix, or the name of a file (.yaml, .json)"
            )
            yield blame(path, f"there is no strategy `{given}`", remedy)
        return
    matrices = given if isinstance(given, dict) else {"": given}
    if isinstance(given, dict):
        yield from _check_layers(given, path, layers)
    for name, matrix in matrices.items():
        where = f"{path}.{name}" if name else path
        if matrix and len(matrix) != num_ranks:
            message = f"{len(matrix)} rows for the {num_ranks} ranks of ep"
            yield blame(where, message, f"write {num_ranks} rows, or `ep: {len(matrix)}`")
        yield from check_matrix(matrix, num_experts, path=where)


def _check_layers(given: dict[str, ExpertMatrix], path: str, layers: Sequence[int]) -> Iterator[Problem]:
    wanted = [str(layer) for layer in layers]
    for name in given:
        if name not in wanted:
            message = f"the model has no MoE layer `{name}`"
            yield blame(f"{path}.{name}", message, f"its MoE layers are {', '.join(wanted)}")
    missing = [name for name in wanted if name not in given]
    if missing:
        remedy = "write a matrix for each of them, or one for all"
        yield blame(path, f"there is no matrix for MoE layer {', '.join(missing)}", remedy)


@reading(FIELD, EXCHANGE, REBALANCE, "layout.experts", "layout.etp", "layout.tp", "layout.ep")
def supported_placement(case: Case) -> Iterator[Problem]:
    """A placed expert is whole on each of its ranks, in moeverify's own weights."""
    layout = case.layout
    if not is_placed(layout):
        return
    field, name = _find_field(layout)
    if layout.expert_tp > 1:
        message = f"{name} together with etp {layout.expert_tp} is not supported: each expert is whole"
        yield blame(field, message, f"write `etp: 1`, or remove {name}")
    if layout.experts == "megablocks":
        message = (
            f"{name} together with `experts: megablocks` is not supported: the package cuts equal blocks"
        )
        yield blame(field, message, f"write `experts: loop`, or remove {name}")


PLACEMENT_RULES = (fitting_placement, supported_placement)
