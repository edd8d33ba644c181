"""Numbers that code reads from tensors in Python and passes to operators later."""

from __future__ import annotations

from recordings import list_ops, make, record_call
from torch import Tensor

from moeverify.explain.numbers import list_hidden_reads
from moeverify.explain.record import Recorder


def test_an_operator_reads_the_tensor_of_its_number() -> None:
    def run(a: Tensor, b: Tensor) -> Tensor:
        one, two = a.sum().item(), b.sum().item()
        return (a * two) + (b * one)

    program = record_call(run, a=make(3), b=make(3, seed=1))
    sums, products = list_ops(program, "sum"), list_ops(program, "mul")
    found = list_hidden_reads(program)
    assert [found[op.number] for op in products] == [op.results[0] for op in reversed(sums)]


def test_a_number_that_python_has_computed_comes_from_what_its_function_has_read() -> None:
    def run(a: Tensor) -> Tensor:
        size = float(a.norm())
        return a * (1.0 / (size + 0.3))

    program = record_call(run, a=make(3))
    (norm,), (product,) = list_ops(program, "linalg_vector_norm"), list_ops(program, "mul")
    assert list_hidden_reads(program)[product.number] == norm.results[0]


def test_constants_are_read_from_nothing() -> None:
    def run(a: Tensor) -> Tensor:
        a.sum().item()
        return (a * 2 + 0.5).exp()

    assert list_hidden_reads(record_call(run, a=make(3))) == {}


def test_what_was_read_before_the_first_step_is_no_read_of_a_step() -> None:
    recorder, a = Recorder(), make(3)
    with recorder.recording():
        a * a.sum().item()
    assert list_hidden_reads(recorder.program) == {}
