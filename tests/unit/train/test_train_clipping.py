"""The gradient norm: sums over stages and shards add no rounding of the gradients' dtype."""

from types import SimpleNamespace

import pytest
import torch

from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.parallel.regions.region import Region
from moeverify.train import clipping
from moeverify.train.clipping import clip_coefficient, clip_gradients, gradient_norm
from moeverify.train.program import TrainingProgram


def hold(gradient):
    tensor = torch.nn.Parameter(torch.zeros_like(gradient))
    tensor.grad = gradient
    return LocalShard("w", tensor, Region.whole(tuple(gradient.shape)))


@pytest.mark.parametrize("where", ["sum_over_stages", "sum_over_shards"])
def test_a_narrow_norm_is_rounded_once(where):
    # 1 and 0.0625: bfloat16 has no 1.00390625 between 1 and 1.0078125, and no square root of it.
    held = hold(torch.ones(1, dtype=torch.bfloat16))
    norm = gradient_norm([held], **{where: lambda square: square + 0.0625**2})
    assert norm.dtype is torch.float32
    assert norm.item() == pytest.approx((1 + 0.0625**2) ** 0.5, rel=1e-6)


def test_the_norm_of_narrow_gradients_is_not_rounded_to_their_dtype():
    # The norm of 300 and 1 is 300.00167; bfloat16 has nothing between 300 and 302.
    gradients = [torch.tensor([300.0], dtype=torch.bfloat16), torch.ones(1, dtype=torch.bfloat16)]
    norm = gradient_norm([hold(gradient) for gradient in gradients])
    assert norm.dtype is torch.float32
    assert norm.item() == pytest.approx((300.0**2 + 1.0) ** 0.5, rel=1e-7)


def test_a_gradient_in_float32_beside_wider_ones_does_not_round_the_norm():
    # float32 has nothing between 16777216 and 16777218; the narrow norm rounds to one of them.
    narrow, wide = torch.tensor([2.0**24, 5792.0]), torch.tensor([3.0], dtype=torch.float64)
    exact = (2.0**48 + 5792.0**2 + 9.0) ** 0.5
    assert gradient_norm([hold(narrow), hold(wide)]).item() == pytest.approx(exact, rel=1e-15)


def test_a_mesh_of_float32_gradients_does_not_round_the_norm_of_all(monkeypatch):
    # Each mesh has its own norm: here those of the narrow and the wide gradients.
    narrow, wide = torch.tensor([2.0**24, 5792.0]), torch.tensor([3.0], dtype=torch.float64)
    asked = []
    measure = clipping.norm_of_one_mesh
    monkeypatch.setattr(clipping, "norm_of_one_mesh", lambda *given: asked.append(given) or measure(*given))
    gradient_norm([hold(narrow), hold(wide)])
    assert {dtype for _, dtype in asked} == {torch.float64}
    assert measure([narrow], torch.float64).item() == pytest.approx((2.0**48 + 5792.0**2) ** 0.5, rel=1e-15)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_placed_experts_leave_the_norm_in_the_dtype_that_it_was_summed_in(dtype):
    # A float64 that was summed in float32 would be judged by the rounding of float64.
    held = hold(torch.full((4,), 0.5, dtype=dtype))
    placed = [SimpleNamespace(sum_squares=lambda: torch.tensor(3.0, dtype=torch.float64))]
    fields = dict.fromkeys(("subject", "model", "buffers", "routers", "share"))
    fields["model"] = torch.nn.Module()
    program = TrainingProgram(**fields, shards=[held], device=torch.device("cpu"), placed=placed)
    norm = program.measure_norm()
    assert norm.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert norm.item() == 2.0


def test_float64_stays_and_the_clip_has_the_dtype_of_the_gradients():
    assert gradient_norm([hold(torch.full((4,), 0.5, dtype=torch.float64))]).dtype is torch.float64
    held = hold(torch.full((4,), 2.0, dtype=torch.bfloat16))
    coefficient = clip_gradients([held], gradient_norm([held]), 1.0)
    assert coefficient.item() == pytest.approx(0.25, rel=1e-5)
    assert held.tensor.grad.dtype is torch.bfloat16
    assert held.tensor.grad.norm().item() == pytest.approx(1.0, rel=1e-2)


@pytest.mark.parametrize("norm", [0.0, 3e-7, 0.5, 0.9999995, 1.0, 7.0])
def test_the_coefficient_is_the_one_by_which_torch_clips(norm):
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    parameter.grad = torch.ones(1, dtype=torch.float64)
    norm = torch.tensor(norm, dtype=torch.float64)
    torch.nn.utils.clip_grads_with_norm_([parameter], max_norm=1.0, total_norm=norm)
    assert clip_coefficient(norm, 1.0) == parameter.grad.item()
