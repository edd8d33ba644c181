"""Lines that a wrong result passes and right ones of its kind do not, or the other way round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from recordings import make
from torch import Tensor

from moeverify.explain.explain import Explainer
from moeverify.explain.program import Program
from moeverify.explain.record import Recorder
from moeverify.explain.upstream import Upstream
from moeverify.parallel.regions.region import Region
from moeverify.results.checks import Kind


def record(run: Callable[[Tensor], Mapping[str, Tensor]], **weights: Tensor) -> Program:
    """Record a function that returns gradients by name."""
    recorder = Recorder()
    x = make(8, 4)
    recorder.name_tensors([("x", x), *weights.items()])
    with recorder.recording():
        recorder.begin_step(0)
        for name, value in run(x).items():
            recorder.observe(0, Kind.GRADIENT, name, value, Region.whole(tuple(value.shape)))
    recorder.program.shares = [((0,), (0,))]
    return recorder.program


def compare(run: Callable[..., Mapping[str, Tensor]], *names: str) -> list[tuple[str, str]]:
    """Return the lines from which the first wrong result comes: those of a rank, against one device.

    The function also takes weights (4) of these names.
    """
    programs = []
    for is_parallel in (True, False):
        weights = {name: make(4, seed=at).requires_grad_() for at, name in enumerate(names, 1)}
        programs.append(record(partial(run, is_parallel=is_parallel, **weights), **weights))
    explainer = Explainer([programs[0]], programs[1], 0, [])
    cause, *_ = explainer.explain(60.0)
    assert cause.known == "scale"
    origins = Upstream(explainer).find(cause)
    return [(each.kind, each.line.expression) for each in origins]


def test_a_computation_of_the_wrong_result_alone_is_named() -> None:
    def run(x: Tensor, is_parallel: bool) -> dict[str, Tensor]:
        found = {"a": x.sin(), "b": x.cos(), "c": x.tanh()}
        if is_parallel:
            found = {name: value * 2.0 / 2.0 for name, value in found.items()}
            found["b"] = found["b"] / 4.0
        return found

    origins = compare(run)
    assert ("alone", 'found["b"] / 4.0') in origins
    assert not any("value * 2.0" in expression for _, expression in origins)


def test_a_computation_that_the_wrong_result_lacks_is_named() -> None:
    def run(x: Tensor, is_parallel: bool) -> dict[str, Tensor]:
        found = {"a": x.sin(), "b": x.cos(), "c": x.tanh()}
        if is_parallel:
            found = {name: value * 2.0 for name, value in found.items()}
            for name in ("a", "c"):
                found[name] = found[name] / 2.0
        return found

    origins = compare(run)
    assert ("missing", "found[name] / 2.0") in origins
    assert [kind for kind, _ in origins if kind == "alone"] == []


def test_a_detached_value_is_no_cause_if_a_gradient_before_it_is_right() -> None:
    def run(x: Tensor, weight: Tensor, other: Tensor, is_parallel: bool) -> dict[str, Tensor]:
        logits = x * weight * other
        if is_parallel:
            top = logits.detach().amax()
            loss = (logits - top).exp().sum().log() + top
        else:
            loss = logits.exp().sum().log()
        loss.backward()
        assert weight.grad is not None
        assert other.grad is not None
        if is_parallel:
            return {"weight": weight.grad, "other": other.grad * 2.0}
        return {"weight": weight.grad, "other": other.grad}

    origins = compare(run, "weight", "other")
    assert [kind for kind, _ in origins if kind == "cut"] == []
    assert ("alone", "other.grad * 2.0") in origins
