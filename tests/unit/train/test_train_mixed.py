"""Mixed precision on one device: float32 parameters, and a model that computes in bfloat16."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moeverify.cases.schema import Recipe
from moeverify.cases.validation.load import build_case
from moeverify.model.mixed_precision import narrow_model
from moeverify.model.transformer import ModelOutput
from moeverify.train.assemble import assemble_single
from moeverify.train.loop import make_batches
from moeverify.train.program import TrainingProgram, compute_dtype_of, dtype_of

CPU = torch.device("cpu")


def make_recipe(preset: str = "stress", precision: str = "mixed") -> Recipe:
    model = {"preset": preset}
    fields = {"model": model, "data": {"batch": 4, "seq_len": 8}, "precision": precision}
    return build_case({"name": "mixed", "recipe": fields, "layout": {"dp_shard": 2}}).recipe


def run(recipe: Recipe, program: TrainingProgram) -> ModelOutput:
    (batch,) = make_batches(recipe, program, 0)
    output: ModelOutput = program.model(batch.tokens, batch.positions, batch.valid)
    return output


def tensors(output: ModelOutput) -> Iterator[Tensor]:
    yield output.logits
    for stats in output.routers:
        yield from stats


@pytest.mark.parametrize("preset", ["stress", "stress-tied"])
def test_forward_is_that_of_a_bfloat16_model_with_the_rounded_weights(preset: str) -> None:
    recipe = make_recipe(preset)
    mixed = assemble_single(recipe, CPU)
    narrow = assemble_single(make_recipe(preset, "bfloat16"), CPU)
    for wide, other in zip(mixed.shards, narrow.shards, strict=True):
        assert wide.name == other.name
        other.local().copy_(wide.local().to(torch.bfloat16))
    for expected, actual in zip(tensors(run(recipe, narrow)), tensors(run(recipe, mixed)), strict=True):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("preset", ["stress", "stress-tied"])
def test_gradients_are_those_of_the_bfloat16_model_in_float32(preset: str) -> None:
    recipe = make_recipe(preset)
    mixed, narrow = assemble_single(recipe, CPU), assemble_single(make_recipe(preset, "bfloat16"), CPU)
    for wide, other in zip(mixed.shards, narrow.shards, strict=True):
        other.local().copy_(wide.local().to(torch.bfloat16))
    for program in (mixed, narrow):
        torch.autograd.backward(run(recipe, program).logits.float().square().mean())
    for wide, other in zip(mixed.shards, narrow.shards, strict=True):
        expected, actual = other.tensor.grad, wide.tensor.grad
        assert expected is not None, other.name
        assert actual is not None, wide.name
        assert actual.dtype == torch.float32
        assert torch.equal(actual, expected.float()), wide.name


def test_micro_batches_add_up_in_float32() -> None:
    linear = nn.Linear(1, 1, bias=False)
    narrow_model(linear, torch.bfloat16)
    for value in (1.0, 2.0**-10):  # bfloat16 would drop the second addend
        linear(torch.full((1, 1), value, dtype=torch.bfloat16)).sum().backward()
    assert linear.weight.grad is not None
    assert linear.weight.grad.item() == 1.0 + 2.0**-10


def test_parameters_hold_the_float32_values_and_buffers_stay() -> None:
    recipe = make_recipe()
    mixed, single = assemble_single(recipe, CPU), assemble_single(make_recipe(precision="float32"), CPU)
    pairs = [
        *zip(mixed.shards, single.shards, strict=True),
        *zip(mixed.buffers, single.buffers, strict=True),
    ]
    for ours, theirs in pairs:
        assert (ours.name, ours.local().dtype) == (theirs.name, torch.float32)
        assert torch.equal(ours.local(), theirs.local())


def test_golden_of_a_mixed_recipe_is_in_float64_at_values_of_float32() -> None:
    golden = assemble_single(make_recipe(), CPU, compute="float64")
    assert run(make_recipe(), golden).logits.dtype == torch.float64
    for held in golden.shards:
        assert held.local().dtype == torch.float64
        assert torch.equal(held.local(), held.local().float().double())


def test_dtypes_of_a_precision() -> None:
    assert (dtype_of("mixed"), compute_dtype_of("mixed")) == (torch.float32, torch.bfloat16)
    for name in ("float64", "float32", "bfloat16"):
        assert dtype_of(name) == compute_dtype_of(name) == getattr(torch, name)


class Decoder(nn.Module):
    """A user's model: a plan for its step, a head tied to the embedding, and recomputed blocks."""

    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.plan = {"steps": 3}
        self.recomputes = recomputes
        self.embed = nn.Embedding(8, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.GELU())
        self.seen: list[tuple[torch.dtype, bool]] = []

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return cast(
            Tensor, checkpoint(self.block, x, use_reentrant=False) if self.recomputes else self.block(x)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        weight = self.embed.weight
        self.seen.append((weight.dtype, isinstance(weight, nn.Parameter)))
        if tokens.numel() == 0:
            raise ValueError("no tokens")
        return nn.functional.linear(self.hidden(tokens), weight)


def make_decoder(make: Callable[[], Decoder] = Decoder) -> Decoder:
    torch.manual_seed(0)
    model = make()
    narrow_model(model, torch.bfloat16)
    return model


TOKENS = torch.arange(6)[None]


def test_outside_of_a_pass_the_model_is_the_users_own() -> None:
    torch.manual_seed(0)
    plain, model = Decoder(), make_decoder()
    assert type(model) is Decoder
    assert model.plan == {"steps": 3}
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    before = dict(model.named_parameters())
    assert model(TOKENS).dtype == torch.bfloat16
    assert model.seen == [(torch.bfloat16, True)]
    for (name, mine), (other, theirs) in zip(
        model.state_dict().items(), plain.state_dict().items(), strict=True
    ):
        assert name == other
        assert mine.dtype == torch.float32
        assert torch.equal(mine, theirs)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


class Twice(nn.Module):
    """Two modules that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(1, 1, bias=False) for _ in range(2))
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x * 2.0**-10)


def test_gradients_of_a_shared_parameter_add_up_in_the_narrow_dtype() -> None:
    model = Twice()
    narrow_model(model, torch.bfloat16)
    model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
    assert model.first.weight.grad is not None
    assert model.first.weight.grad.item() == 1.0  # bfloat16 drops the second addend


def test_ignored_parameters_stay() -> None:
    model = Decoder()
    narrow_model(model, torch.bfloat16, {model.embed.weight})
    assert model.embed(TOKENS).dtype == torch.float32
    assert model.block(torch.ones(4, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_parameters_without_gradients_may_have_another_dtype() -> None:
    model = nn.Module()
    model.table = nn.Parameter(torch.arange(3), requires_grad=False)
    model.forward = lambda: model.table  # type: ignore[method-assign]
    narrow_model(model, torch.bfloat16)
    assert model().dtype == torch.int64


def test_a_parameter_that_the_pass_sets_stays() -> None:
    model = nn.Linear(2, 2)
    new = nn.Parameter(torch.ones(2, 2))
    model.register_forward_hook(lambda module, inputs, output: setattr(module, "weight", new))
    narrow_model(model, torch.bfloat16)
    model(torch.ones(2, dtype=torch.bfloat16))
    assert model.weight is new


def test_parameters_in_the_narrow_dtype_are_left_alone() -> None:
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    narrow_model(model, torch.bfloat16)
    output = model(torch.ones(2, dtype=torch.bfloat16))
    sharded = model.weight = nn.Parameter(torch.ones(2, 2))  # as FSDP2 does after the forward pass
    output.sum().backward()
    assert model.weight is sharded


def test_copies_end_with_the_graph_of_their_pass() -> None:
    model = Decoder()
    kept = []
    model.block.register_forward_hook(lambda module, inputs, output: kept.append(ref(module[0].weight)))
    narrow_model(model, torch.bfloat16)
    output = model(TOKENS)
    assert kept[0]() is not None
    del output
    assert kept[0]() is None


def test_methods_and_modules_that_a_step_calls_are_narrow_too() -> None:
    model = make_decoder()
    assert model.hidden(TOKENS).dtype == torch.bfloat16
    assert model.block[0](torch.ones(4, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_recomputed_blocks_compute_with_copies_again() -> None:
    gradients = []
    for recomputes in (False, True):
        model = make_decoder(partial(Decoder, recomputes=recomputes))
        model(TOKENS).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for expected, actual in zip(*gradients, strict=True):
        assert expected is not None
        assert actual is not None
        assert torch.equal(actual, expected)


class Tiled(torch.autograd.Function):
    """A module's output, which the backward pass computes again by the module."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module, *weights: Tensor) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x, *weights)
        with torch.no_grad():
            return cast(Tensor, module(x))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        inside = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.module(inside)
        found = torch.autograd.grad(y, [inside, *weights], gradients)
        return found[0], None, *found[1:]


@dataclass
class Output:
    logits: Tensor


class Recomputing(Decoder):
    """A decoder with a block in `Tiled`, and an output whose tensors torch cannot list."""

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        return Output(self.block[1](Tiled.apply(x, self.block[0], *self.block[0].parameters())))


def test_user_code_of_a_backward_pass_computes_with_the_copies_of_the_forward_pass() -> None:
    plain, model = make_decoder(), make_decoder(Recomputing)
    before = dict(model.named_parameters())
    expected = plain.hidden(TOKENS).float()
    outputs = [model(TOKENS).logits for _ in range(2)]  # two micro-batches before the first backward pass
    for output in outputs:
        output.float().square().sum().backward()
        assert all(parameter is before[name] for name, parameter in model.named_parameters())
    (2 * expected.square().sum()).backward()
    for name, parameter in plain.named_parameters():
        assert before[name].grad is not None
        assert torch.equal(before[name].grad, parameter.grad), name


def test_a_backward_pass_through_two_passes_has_the_copies_of_each() -> None:
    model = make_decoder(Recomputing)
    sum(model(TOKENS).logits.float().square().sum() for _ in range(2)).backward()
    together = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    for _ in range(2):
        model(TOKENS).logits.float().square().sum().backward()
    for expected, parameter in zip(together, model.parameters(), strict=True):
        assert torch.equal(expected, parameter.grad)


def test_a_graph_that_is_kept_has_its_copies_in_each_backward_pass() -> None:
    model = make_decoder(Recomputing)
    output = model(TOKENS).logits
    for _ in range(2):
        output.sum().backward(retain_graph=True)


def test_a_pass_that_fails_puts_the_parameters_back() -> None:
    model = make_decoder()
    with pytest.raises(ValueError, match="no tokens"):
        model(TOKENS[:, :0])
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model(TOKENS).dtype == torch.bfloat16


def test_a_copy_of_the_model_has_copies_of_its_own() -> None:
    model = make_decoder()
    other = copy.deepcopy(model)
    nn.init.zeros_(other.embed.weight)
    assert other(TOKENS).count_nonzero() == 0
    assert model(TOKENS).count_nonzero() > 0
    assert {parameter.dtype for parameter in other.parameters()} == {torch.float32}
