"""Order of two causes when one implies the other."""

from __future__ import annotations

import pytest
from wrong_tensors import draw, make_inputs, make_tensor

from moeverify.explain.fitting.causes_first import put_modules_first
from moeverify.explain.fitting.engine import DiagnosedCause
from moeverify.parallel.regions.region import Region
from moeverify.results.cause import Cause
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.factor import Factor, Product
from moeverify.results.operation import Operation, Scaled, Unreduced
from moeverify.results.part import WHOLE, Contribution

TP, EP = Product(times=("tp",)), Product(times=("ep",))
NAMES = ("layers.0.norm.weight", "layers.0.attention.o_proj.weight", "layers.1.norm.weight", "head.weight")
PARTIAL = Unreduced(axes=(TP,), num_replicas=2, factor=Factor(value=1.0))
PARTIAL_OVER_EP = Unreduced(axes=(EP,), num_replicas=2, factor=Factor(value=1.0))


def make_cause(operation: Operation, name: str, module: str = "") -> DiagnosedCause:
    expected = draw(3, 2)
    tensor = make_tensor(expected, 2.0 * expected, name=name)
    quantity = Quantity.MODULE_GRADIENT if module else Quantity.GRADIENT
    subject = Subject(quantity=quantity, tensors=() if module else (name,), module=module)
    return DiagnosedCause((tensor,), Explanation(cause=Cause.BACKWARD, subject=subject, operation=operation))


def scaled(*equals: Product) -> Scaled:
    return Scaled(contributions=(Contribution(part=WHOLE, factor=Factor(value=2.0, equals=equals)),))


@pytest.mark.parametrize(
    ("operation", "factor", "name", "leads"),
    [
        (PARTIAL, scaled(), NAMES[0], True),
        (PARTIAL, scaled(EP), NAMES[0], False),
        (PARTIAL, scaled(), NAMES[2], False),  # the tensors after the module get nothing of it
    ],
)
def test_what_a_module_passes_back_leads_where_factors_come_of_it(
    operation: Operation, factor: Operation, name: str, leads: bool
) -> None:
    module = make_cause(operation, NAMES[1], module="layers.0.attention.o_proj")
    parameters = make_cause(factor, name)
    inputs = make_inputs(regions={each: {0: Region.whole((3, 2))} for each in NAMES})
    found = put_modules_first([parameters, module], inputs)
    assert [each is module for each in found] == [leads, not leads]


@pytest.mark.parametrize(("partial", "leads"), [(PARTIAL, True), (PARTIAL_OVER_EP, False)])
def test_what_the_head_passes_back_in_parts_leads_before_parameters_that_are_partial(
    partial: Operation, leads: bool
) -> None:
    module, parameters = make_cause(PARTIAL, NAMES[3], module="head"), make_cause(partial, NAMES[2])
    inputs = make_inputs(regions={each: {0: Region.whole((3, 2))} for each in NAMES})
    found = put_modules_first([parameters, module], inputs)
    assert [each is module for each in found] == [leads, not leads]
