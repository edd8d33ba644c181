"""Building blocks of the explanations whose sentences are tested: parts, factors and short results."""

from __future__ import annotations

from typing import Any

from moeverify.results.cause import Cause
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.factor import Factor, Product
from moeverify.results.operation import Scaled
from moeverify.results.part import WHOLE, Contribution, Group, Part, Tokens

EP, EFSDP, TP = (Product(times=(name,)) for name in ("ep", "efsdp", "tp"))
ROWS = Product(over=("rows of the batch",))
EXPERTS = {"tensors": tuple(f"layers.{n}.moe.experts.up" for n in range(12)), "family": "expert"}
DP_0, DP_2 = (Part(tokens=Tokens(data_rank=rank)) for rank in (0, 2))
REPLICATED = Part(group=Group(tensors=("a", "b"), axis="tp", placement="replicated"))


def explain(cause: Cause, quantity: Quantity, operation: Any, **subject: Any) -> Explanation:
    content = {"tensors": ("w",), **subject} if "module" not in subject else subject
    return Explanation(cause=cause, subject=Subject(quantity=quantity, **content), operation=operation)


def scale(value: float, *equals: Product, part: Part = WHOLE, power: int = 1) -> Contribution:
    return Contribution(part=part, factor=Factor(value=value, power=power, equals=equals))


def scaled(*contributions: Contribution, **fields: Any) -> Scaled:
    return Scaled(contributions=contributions, **fields)


GRADIENT, OUTPUT, BACK = Quantity.GRADIENT, Quantity.OUTPUT, Quantity.MODULE_GRADIENT
