"""A user's own module as its own formula: which mistake in it gives what ranks have, and when nothing is said."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from own_models import Layer, Mixer, find_mistakes, only
from torch import Tensor, nn
from torch.nn import functional as F

from moeverify.diagnose.own.replay import Candidate
from moeverify.diagnose.own.search import Found, Search
from moeverify.report.words.own_module import describe_mistake


def set_attribute(name: str, value: object) -> Callable[[Layer], None]:
    return lambda layer: setattr(layer.mixer, name, value)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return 2.0 * gradient


def test_a_number_of_the_module_is_fitted_and_named_with_both_values() -> None:
    mistake = only(find_mistakes(set_attribute("scaling", 0.3)))
    assert (mistake.part, mistake.name, mistake.way, mistake.before) == (
        "attribute",
        "scaling",
        "fitted",
        "0.5",
    )
    assert mistake.number == pytest.approx(0.3, abs=1e-12)
    # One that the output does not follow in a straight line.
    assert only(find_mistakes(set_attribute("cap", 2.0))).number == pytest.approx(2.0, abs=1e-12)


def test_a_flag_of_the_module_is_turned() -> None:
    mistake = only(find_mistakes(set_attribute("is_causal", False)))
    assert (mistake.name, mistake.after) == ("is_causal", "False")


def test_one_rank_alone_is_named() -> None:
    found = find_mistakes({1: set_attribute("scaling", 0.25)})
    assert found is not None
    assert (found.ranks, only(found).number) == ((1,), 0.25)


@pytest.mark.slow
def test_ranks_that_are_wrong_in_different_ways_have_no_one_mistake() -> None:
    assert find_mistakes({0: set_attribute("scaling", 0.25), 1: set_attribute("scaling", 0.75)}) is None


def test_a_module_that_is_left_out_is_named_by_its_name() -> None:
    def leave_out(layer: Layer) -> None:
        layer.mixer.second_norm = nn.Identity()  # type: ignore[assignment]

    mistake = only(find_mistakes(leave_out))
    assert (mistake.part, mistake.name, mistake.way) == ("child", "mixer.second_norm", "left-out")


def test_an_input_that_does_not_arrive_is_named() -> None:
    def drop(layer: Layer) -> None:
        layer.mixer.register_forward_pre_hook(lambda m, args, named: (args, {}), with_kwargs=True)

    found = find_mistakes(drop)
    assert found is not None
    assert {(each.part, each.name) for each in found.mistakes} == {("input", "mask")}


def test_a_parameter_of_another_module_is_named_with_it() -> None:
    def exchange(layer: Layer) -> None:
        layer.mixer.first_norm.weight = layer.mixer.second_norm.weight

    mistake = only(find_mistakes(exchange))
    assert (mistake.part, mistake.way, mistake.after) == ("parameter", "other", "mixer.second_norm.weight")


def test_a_bias_that_every_rank_adds_is_counted() -> None:
    def add(layer: Layer) -> None:
        layer.mixer.out.register_forward_hook(lambda m, args, out: out + m.bias)

    mistake = only(find_mistakes(add))
    assert (mistake.part, mistake.name, mistake.way) == ("parameter", "bias", "times")
    assert mistake.number == pytest.approx(2.0)


def test_a_step_is_named_with_its_place_in_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(layer: Layer) -> None:
        layer.mixer.forward = lambda x, mask: wrong(layer.mixer, x, mask)  # type: ignore[method-assign, assignment]

    def wrong(mixer: Mixer, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        with monkeypatch.context() as patch:
            patch.setattr(F, "silu", F.relu)
            return Mixer.forward(mixer, x, mask=mask)

    mistake = only(find_mistakes(forward))
    assert (mistake.part, mistake.name, mistake.way, mistake.after) == ("step", "silu", "function", "relu")
    assert mistake.line.startswith("own_models.py:")


@pytest.mark.slow
def test_a_residual_that_is_added_again_is_named() -> None:
    def add(layer: Layer) -> None:
        layer.mixer.register_forward_hook(lambda m, args, out: (out[0] + 0.5 * args[0], out[1]))

    mistake = only(find_mistakes(add))
    assert (mistake.part, mistake.name, mistake.way) == ("sum", "x", "added")
    assert mistake.number == pytest.approx(0.5)


def test_a_gradient_that_does_not_come_back_is_named_by_the_module_that_it_should_come_through() -> None:
    def cut(layer: Layer) -> None:
        layer.mixer.keys.register_forward_pre_hook(lambda m, args: (args[0].detach(),))

    found = find_mistakes(cut)
    assert found is not None
    assert {each.name for each in found.mistakes} == {"mixer.keys"}
    assert {each.way for each in found.mistakes} == {"input-detached"}


@pytest.mark.slow
def test_a_gradient_that_comes_back_twice_is_counted() -> None:
    def double(layer: Layer) -> None:
        layer.mixer.values.register_forward_hook(lambda m, args, out: Twice.apply(out))

    found = find_mistakes(double)
    assert found is not None
    assert {each.number for each in found.mistakes} == {2.0}
    assert "mixer.values" in {each.name for each in found.mistakes}


@pytest.mark.slow
def test_what_is_no_mistake_of_the_module_is_not_explained() -> None:
    noise = torch.randn(1, 6, 16, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    assert find_mistakes(lambda layer: None, spoil=lambda out: out + 0.1 * noise) is None
    assert (
        find_mistakes(lambda layer: None, spoil=lambda out: out + 0.01 * out.sin() * out.roll(1, -1)) is None
    )


def test_every_mistake_that_is_tried_has_words(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()

    def note(self: Search, tiers: Iterable[Iterable[Candidate]]) -> Found:
        for candidate in (each for tier in tiers for each in tier):
            mistake = candidate.mistake.model_copy(update={"number": candidate.mistake.number or 2.0})
            text = describe_mistake(mistake, "mixer")
            assert text.startswith("with")
            assert "{" not in text
            seen.add(f"{mistake.part} {mistake.way.partition(':')[0]}")
        return Found()

    monkeypatch.setattr(Search, "run", note)
    find_mistakes(set_attribute("cap", 2.0))
    find_mistakes(
        lambda layer: layer.mixer.keys.register_forward_pre_hook(lambda m, args: (args[0].detach(),))
    )
    assert {"attribute fitted", "child left-out", "parameter zero", "input moved", "step one"} <= seen
    assert {"sum added", "step operand-detached", "child input-gradient"} <= seen


def test_a_module_that_cannot_be_called_again_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Search, tiers: object) -> Found:
        raise ValueError

    monkeypatch.setattr(Search, "run", fail)
    assert find_mistakes(set_attribute("cap", 2.0)) is None
