"""The layouts that `moeverify init` tries for a model."""

from __future__ import annotations

import pytest

from moeverify.results.factory import TriedModel
from moeverify.verification.controller.init import list_candidates


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, ["ddp", "fsdp2"]),
        ({"framework": "lightning"}, ["ddp", "fsdp2", "fabric-ddp", "fabric-fsdp2"]),
        ({"framework": "transformers"}, ["ddp", "fsdp2", "tp", "fsdp", "tp-ep"]),
        (
            {"parallelize": "net:parallelize", "expert_degrees": ("ep_size",)},
            ["ddp", "fsdp2", "own-dp-replicate", "own-dp-shard", "own-tp", "own-cp", "own-ep-size"],
        ),
    ],
)
def test_layouts_follow_from_the_framework_and_the_own_function(
    fields: dict[str, object], names: list[str]
) -> None:
    given = {"title": "Net", "factory": "net:Net", "vocab_size": 8, "parameters": (8, 8), "seconds": 0.1}
    model = TriedModel.model_validate({**given, **fields})
    assert [each.name for each in list_candidates(model)] == names
