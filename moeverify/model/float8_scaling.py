"""Scaling of linear layers' operands before rounding to float8, under torchao's recipe names.

A linear layer has three products: the outputs, and in the backward pass the gradients of the inputs and the
weights. Each operand is scaled by its largest element, as a whole or per row along the summed dim, and
rounded to float8. The format e4m3 has 3 explicit mantissa bits and a largest value of 448; e5m2 has 2 bits
and 57344.

Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning" (arXiv 2209.05433); torchao 0.18,
`torchao.float8.config`, `Float8LinearConfig.from_recipe_name`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from moeverify.cases.choice import Row, Table
from moeverify.cases.rule import blame, experts, reading, reference_model
from moeverify.cases.schema import Case
from moeverify.errors import Problem
from moeverify.results.obstacle import MissingPackages, Obstacle, UnsupportedHere

UNIT = 16
"""float8 kernels need weight sizes that are multiples of this number. Other layers are not converted."""

Format = Literal["e4m3", "e5m2"]


@reading("recipe.float8", "recipe.model", "layout.parallelize", "layout.compile")
def layers_of_the_reference(case: Case) -> Iterator[Problem]:
    """Require the reference model: other code decides itself which layers use float8."""
    path = "recipe.float8"
    if case.recipe.model.reference is None:
        message = (
            "float8 is for the linear layers of the reference model, and this is a model with a `factory`"
        )
        yield blame(path, message, "remove it")
    elif case.layout.parallelize is not None:
        yield blame(path, "your own function cannot be told which layers are in float8", "remove one of them")
    if case.layout.compile != "none":
        yield blame("layout.compile", "compiled parts together with float8 are not supported", "remove it")


@reading("recipe.float8", *(f"recipe.model.{name}" for name in ("hidden", "num_heads", "head_dim", "mla")))
def sizes_of_kernels(case: Case) -> Iterator[Problem]:
    """Require sizes that float8 kernels accept, at least in the attention's output projection."""
    model = reference_model(case)
    if model is None:
        return
    width = model.num_heads * (model.head_dim if model.mla is None else model.mla.v_head)
    for path, size in (("recipe.model.hidden", model.hidden), ("recipe.model.num_heads", width)):
        if size % UNIT:
            what = "hidden" if path.endswith("hidden") else "the width of all heads"
            message = f"{what} {size} is no multiple of {UNIT}, and float8 needs one"
            yield blame(path, message, f"use {size + -size % UNIT}, or remove recipe.float8")


@reading("recipe.float8", "recipe.precision")
def rounded_differently(case: Case) -> Iterator[Problem]:
    """Reject scales over several tokens in float64: they differ between layouts, and only bugs may differ."""
    if case.recipe.precision == "float64" and FLOAT8.find(case.recipe.float8).depends_on_tokens:
        scales = f"the scales of {case.recipe.float8}"
        message = f"{scales} depend on the tokens of a rank, and float64 allows no such difference"
        remedy = "write float8 `rowwise_with_gw_hp`, whose scales do not, or another precision"
        yield blame("recipe.precision", message, remedy)


@reading("recipe.float8", *(f"recipe.model.moe.balance_{x}" for x in ("scope", "coef")))
def measurable_scales(case: Case) -> Iterator[Problem]:
    """Require losses that do not depend on micro-batches, which measure the effect of smaller scales."""
    scaling, moe = FLOAT8.find(case.recipe.float8), experts(case)
    if moe is None or not scaling.depends_on_tokens:
        return
    if moe.balance_scope == "batch" and moe.balance_coef > 0.0:
        message = (
            f"the scales of {case.recipe.float8} depend on micro-batches, and so does balance_scope `batch`"
        )
        remedy = "write balance_scope `sequence`, or float8 `rowwise_with_gw_hp`"
        yield blame("recipe.model.moe.balance_scope", message, remedy)


@dataclass(frozen=True, kw_only=True)
class OperandScaling(Row):
    """Choice of operands with a scale per row instead of one scale.

    `rows` applies to all operands except the weight in the product for the input gradient, which
    `weight_rows` controls. `power_of_two` rounds scales down to a power of two. With `wide_weight_gradient`
    the weight gradient is not computed in float8.
    """

    gradient: Format = "e4m3"
    rows: bool = True
    weight_rows: bool = True
    power_of_two: bool = True
    wide_weight_gradient: bool = False

    @property
    def depends_on_tokens(self) -> bool:
        """Return whether a scale covers several tokens and therefore depends on a rank's share of them."""
        return not self.rows or not self.wide_weight_gradient

    def find_obstacle(self, case: Case, device: str, backend: str) -> Obstacle | None:
        """Return the missing requirement for training a layout here, if any; see `Implementation`."""
        if importlib.util.find_spec("torchao") is None:
            install = "pip install 'moeverify[float8]'"
            return MissingPackages(needed_by="float8", packages=("torchao",), install=install)
        gathers = case.layout.sequence_parallel or case.layout.slices_tokens
        if backend == "gloo" and not self.rows and case.layout.tp > 1 and gathers:
            return UnsupportedHere(why="torchao gathers operands in float8, and gloo cannot send float8")
        return None


@dataclass(frozen=True, kw_only=True)
class _None(OperandScaling):
    def find_obstacle(self, case: Case, device: str, backend: str) -> Obstacle | None:
        return None


_RULES = (layers_of_the_reference, sizes_of_kernels, rounded_differently, measurable_scales)

FLOAT8: Table[OperandScaling] = Table(
    path="recipe.float8",
    home=__name__,
    rows={
        "none": _None(meaning="All products are in the precision of the recipe."),
        "rowwise": OperandScaling(
            meaning="A scale for each row of each operand, a power of two; e4m3 alone.",
            rules=_RULES,
        ),
        "rowwise_with_gw_hp": OperandScaling(
            meaning="The same, with the gradient of the weights in the precision of the recipe.",
            rules=_RULES,
            weight_rows=False,
            wide_weight_gradient=True,
        ),
        "tensorwise": OperandScaling(
            meaning="One scale for each operand; gradients are in e5m2.",
            rules=_RULES,
            gradient="e5m2",
            rows=False,
            weight_rows=False,
            power_of_two=False,
        ),
    },
)
