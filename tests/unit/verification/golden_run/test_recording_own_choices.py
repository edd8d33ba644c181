"""The noise of buffers that depend on choices near a tie."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moeverify.cases.schema import Precision
from moeverify.cases.validation.load import build_case
from moeverify.results.checks import Kind
from moeverify.verification.golden.noise import PERTURBED_RUNS, WIDEST, noise_key
from moeverify.verification.golden.store import StoredGolden
from moeverify.verification.golden_run.golden import make_golden

CPU = torch.device("cpu")

PROGRAM = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.register_buffer("bias", torch.zeros(2))

    def forward(self, tokens):
        x = self.embed(tokens).flatten(0, 1)
        # 1.0045 and 1.0055. In bfloat16 the numbers next to 1 are 2**-7 apart: 1.0078 and 1.0.
        one = torch.ones(len(x), dtype=x.dtype)
        scores = torch.stack([one + 0.0045, one + 0.0035 + 0.002], dim=1)
        load = torch.bincount(scores.topk(1).indices.flatten(), minlength=2).to(self.bias.dtype)
        with torch.no_grad():
            self.bias.copy_(0.5 * (load.mean() - load).sign())
        return (x @ self.embed.weight.T).unflatten(0, tokens.shape)


def make():
    return Model()
"""


@pytest.fixture(autouse=True, scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Put the user's model on the path."""
    folder = tmp_path_factory.mktemp("choices")
    (folder / "own_choices.py").write_text(PROGRAM)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_a_buffer_has_the_noise_of_choices_that_a_run_does_not_repeat(
    precision: Precision, tmp_path: Path
) -> None:
    recipe = {
        "name": "r",
        "model": {"factory": "own_choices:make", "vocab_size": 16},
        "data": {"batch": 4, "seq_len": 4},
        "precision": precision,
        "steps": 1,
    }
    case = build_case({"name": "c", "recipe": recipe, "layout": {"dp_replicate": 2}})
    make_golden(case.recipe, tmp_path, CPU)
    noise = StoredGolden(tmp_path).noise
    key = noise_key(0, Kind.BUFFER, "bias")
    assert (noise[key] >= 1.0) == (precision == "bfloat16")
    widest = noise.get(f"{WIDEST}{key}")
    assert (widest == PERTURBED_RUNS.index("own choices")) == (precision == "bfloat16")
    assert f"{WIDEST}{noise_key(0, Kind.GRADIENT, 'embed.weight')}" in noise
