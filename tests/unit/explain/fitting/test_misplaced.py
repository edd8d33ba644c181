"""Parameters whose placement gives them another shape than on one device."""

from __future__ import annotations

import torch

from moeverify.explain.fitting.axes import Axes
from moeverify.explain.fitting.capture import assemble_tensors, find_other_shapes
from moeverify.explain.fitting.diagnosis import diagnose
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.misplaced import explain_shapes
from moeverify.parallel.regions.region import Region
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName
from moeverify.results.factor import Product, Source
from moeverify.results.finding import Finding

AXES = Axes({"tp": [[0, 1]], "ep": [[0, 1, 2]]}, [Source(name="tp", size=2), Source(name="ep", size=3)])


def test_the_axis_is_the_one_of_so_many_ranks() -> None:
    shapes = {
        "layers.0.bias": ((4, 5), (8, 5)),
        "layers.1.bias": ((4, 5), (8, 5)),
        "head.weight": ((4, 5), (4, 7)),
    }
    first, second = explain_shapes(shapes, AXES)
    assert first.explanation.subject.tensors == ("layers.0.bias", "layers.1.bias")
    assert first.explanation.operation.dim == 0
    assert first.explanation.candidates == (Product(times=("tp",)),)
    assert first.explanation.cause is Cause.LAYOUT
    # Seven is no multiple of five: only the difference of the shapes is known.
    assert second.explanation.operation.dim is None
    assert second.explanation.candidates == ()


def test_what_is_placed_as_a_part_of_a_larger_tensor_is_not_read_from_the_golden() -> None:
    key = (-1, "initial_weight", "layers.0.bias")
    region = Region.box((8, 5), (range(4, 8), range(5)))
    captured = [[(key, region, torch.zeros(4, 5))]]
    golden = torch.zeros(4, 5)
    assert assemble_tensors(captured, lambda _: golden, torch.float64) == {}
    shapes = find_other_shapes(captured, lambda _: golden)
    assert shapes == {"layers.0.bias": ((4, 5), (8, 5))}
    finding = Finding(
        check=CheckName.INITIAL_STATE,
        kind="initial_weight",
        tensor="layers.0.bias",
        step=-1,
        rank=1,
        error=1.0,
        bound=0.0,
    )
    (head,) = diagnose([finding], DiagnosisInputs(axes=AXES, shapes=shapes))
    assert head.explanation.candidates == (Product(times=("tp",)),)
