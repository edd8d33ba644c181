"""Values of one parameter in another's place: copies, exchanges, buffers that are filled or cut in another way."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor
from wrong_tensors import draw, examine, make_inputs, make_tensor

from moeverify.diagnose.components import Cell, Components
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.layout.region import Region
from moeverify.results.cause import Cause
from moeverify.results.operation import Replaced
from moeverify.results.part import Tokens
from moeverify.results.slots import Displaced, Flattening, Piece

SHAPES = {"a.weight": (6, 5), "a.bias": (10,), "b.weight": (5, 6), "b.bias": (9,), "c.weight": (4, 8)}
PARTS = [
    {name: draw(*shape, seed=10 * rank + n) for n, (name, shape) in enumerate(SHAPES.items())}
    for rank in (0, 1)
]
RIGHT = {name: PARTS[0][name] + PARTS[1][name] for name in SHAPES}
Change = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


def exchange(one: str, other: str) -> Change:
    return lambda values: {
        **values,
        one: values[other].reshape(SHAPES[one]),
        other: values[one].reshape(SHAPES[other]),
    }


def cut(values: Mapping[str, Tensor], buffer: Tensor) -> dict[str, Tensor]:
    parts = buffer.split([value.numel() for value in values.values()])
    return {name: part.reshape(SHAPES[name]) for name, part in zip(values, parts, strict=True)}


def flatten(values: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([value.reshape(-1) for value in values.values()])


def reverse(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return cut(values, flatten(dict(reversed(values.items()))))


def fill(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    filled = [torch.cat([each.reshape(-1), each.new_zeros(-each.numel() % 4)]) for each in values.values()]
    return cut(values, torch.cat(filled)[: len(flatten(values))])


def gather(
    on_ranks: list[Mapping[str, Tensor]], *, kind: str = "gradient", right: Mapping[str, Tensor] = RIGHT
) -> DiagnosisInputs:
    """Return inputs with all tensors of which some rank has other values than one device."""
    tensors = [
        make_tensor(right[name], *(values[name] for values in on_ranks), name=name, kind=kind)
        for name in SHAPES
        if any(not torch.equal(values[name], right[name]) for values in on_ranks)
    ]
    cells = tuple(Cell(Tokens(data_rank=rank), (rank,), (0,)) for rank in (0, 1))
    components = Components(cells, {"lm": [dict(part) for part in PARTS]}, {}, (1, 1), tuple(SHAPES))
    return make_inputs(
        *tensors,
        components=components,
        regions={name: {rank: Region.whole(shape) for rank in (0, 1)} for name, shape in SHAPES.items()},
        golden=lambda kind, name, before: right.get(name),
    )


def find(inputs: DiagnosisInputs, name: str) -> WrongTensor:
    return next(tensor for tensor in inputs.tensors.values() if tensor.name == name)


def explain(inputs: DiagnosisInputs, name: str) -> object:
    """Return what is said of one of the wrong tensors, nothing where it is refused."""
    explanation = examine("another_slot", find(inputs, name), inputs).explanation
    return None if explanation is None else explanation.operation


def mean_with(change: Change) -> list[Mapping[str, Tensor]]:
    """Return what both ranks have where rank 1 brought changed values to the sum."""
    brought = change(PARTS[1])
    total = {name: PARTS[0][name] + brought[name] for name in SHAPES}
    return [total, total]


def test_exchanged_on_all_ranks_or_in_what_one_adds() -> None:
    change = exchange("a.weight", "b.weight")
    inputs = gather([change(RIGHT)] * 2)
    assert explain(inputs, "a.weight") == Displaced(source="b.weight", exchanged=True)
    inputs = gather(mean_with(change))
    wanted = Displaced(source="a.weight", exchanged=True, tokens=Tokens(data_rank=1))
    assert explain(inputs, "b.weight") == wanted


def test_a_copy_of_another_one_on_one_rank() -> None:
    changed = {**RIGHT, "a.weight": RIGHT["b.weight"].reshape(6, 5)}
    inputs = gather([RIGHT, changed])
    found = examine("another_slot", find(inputs, "a.weight"), inputs).explanation
    assert found.cause is Cause.DUPLICATE
    assert found.operation == Replaced(by="tensor", tensor="b.weight", ranks=(1,))


def test_another_one_beside_its_own() -> None:
    def add(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {**values, "a.weight": values["a.weight"] + values["b.weight"].reshape(6, 5)}

    inputs = gather(mean_with(add))
    wanted = Displaced(source="b.weight", tokens=Tokens(data_rank=1), added=True)
    assert explain(inputs, "a.weight") == wanted


@pytest.mark.parametrize("offset", [3, -3])
@pytest.mark.parametrize("wraps", [False, True])
def test_all_stand_some_elements_further_on(offset: int, wraps: bool) -> None:
    buffer = flatten(RIGHT).roll(-offset)
    if not wraps:
        (buffer[-offset:] if offset > 0 else buffer[:-offset]).zero_()
    inputs = gather([cut(RIGHT, buffer)] * 2)
    assert [explain(inputs, name) for name in SHAPES] == [Displaced(offset=offset)] * len(SHAPES)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        pytest.param(reverse, Flattening(written="reversed", read="registered"), id="reversed"),
        pytest.param(
            fill, Flattening(written="registered", read="registered", filled_written=4), id="filled"
        ),
    ],
)
def test_a_buffer_is_cut_otherwise_than_it_was_written(change: Change, wanted: Flattening) -> None:
    inputs = gather([change(RIGHT)] * 2)
    found = {explain(inputs, tensor.name) for tensor in inputs.tensors.values()}
    assert found == {Displaced(flattening=wanted)}


def test_the_head_of_a_larger_one() -> None:
    changed = {**RIGHT, "a.bias": RIGHT["c.weight"].reshape(-1)[2:12]}
    pieces = (Piece(at=0, count=10, tensor="c.weight", start=2),)
    assert explain(gather([changed] * 2), "a.bias") == Displaced(pieces=pieces, num_pieces=1)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda value: 2.0 * value, id="doubled"),
        pytest.param(torch.zeros_like, id="zero"),
        pytest.param(lambda value: value.flip(0), id="moved inside"),
        pytest.param(lambda value: torch.full_like(value, float(RIGHT["b.weight"][0, 0])), id="one number"),
        pytest.param(lambda value: draw(6, 5, seed=99), id="other numbers"),
        pytest.param(lambda value: value - PARTS[1]["a.weight"], id="without a rank"),
    ],
)
def test_what_has_no_values_of_others(change: Callable[[Tensor], Tensor]) -> None:
    changed = {**RIGHT, "a.weight": change(RIGHT["a.weight"])}
    assert explain(gather([changed] * 2), "a.weight") is None


def test_signs_are_those_of_others_by_chance() -> None:
    signs = {name: value.sign() for name, value in RIGHT.items()}
    changed = {**signs, "a.weight": signs["b.weight"].reshape(6, 5)}
    inputs = gather([changed] * 2, kind="update", right=signs)
    assert explain(inputs, "a.weight") is None
