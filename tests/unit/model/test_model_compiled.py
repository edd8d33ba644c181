from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moeverify.cases.schema import Recompute
from moeverify.model.transformer import Transformer
from moeverify.parallel.compile import compile_parts
from moeverify.parallel.recompute import apply_recompute


def run(model: nn.Module, tokens: Tensor) -> list[Tensor]:
    """Return the logits, the inputs of the router losses, and all gradients."""
    model.zero_grad()
    logits, routers = model(tokens)
    loss = logits.logsumexp(dim=-1).sum()
    for stats in routers:
        loss = loss + stats.z_sum + stats.probability_sum.square().sum()
    loss.backward()
    shown = [part for stats in routers for part in stats]
    return [each.detach() for each in [logits, *shown, *(part.grad for part in model.parameters())]]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
# torch reads `.grad` of the tensors that it traces.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_parts_compute_the_same_and_all_layers_share_their_graphs(
    make_spec: Callable[..., Any],
    make_model: Callable[..., Transformer],
    monkeypatch: pytest.MonkeyPatch,
    recompute: Recompute,
) -> None:
    # Traced and differentiated graphs are equal for every backend; the default one takes minutes on a CPU.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # of other tests in this process
    model = make_model(make_spec(num_layers=3, num_dense_layers=0))
    tokens = torch.arange(12).view(2, 6) % 7
    expected = run(model, tokens)
    compile_parts(model)
    if recompute != "none":
        apply_recompute(model, recompute)
    graphs = torch._dynamo.utils.counters["stats"]
    actual = run(model, tokens)
    assert graphs["unique_graphs"] == 2  # attention with its norms, the router
    for before, after in zip(expected, actual, strict=True):
        torch.testing.assert_close(after, before)
    run(model, tokens)
    assert graphs["unique_graphs"] == 2
