"""A script that calls `forward` directly: the outermost module is heard once per pass, and restored."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moeverify.scripts.record.model import WatchedModel, find_rows
from moeverify.train.calls.hooks import install
from moeverify.train.calls.listener import Listener


class Stage(nn.Module):
    """Layers that a pipeline calls through `forward`, inside of another module that does so too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


class Outer(nn.Module):
    """A wrapper that calls its module's `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = Stage()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.stage.forward(tokens)


class Heard(Listener):
    """A listener that keeps the models and the number of their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: list[tuple[str, int]] = []

    def enter_model(self, module: nn.Module, frame: object, trains: bool) -> None:
        self.passes.append((type(module).__name__, len(list(find_rows(frame)))))


def test_the_outermost_module_is_the_model_of_every_pass() -> None:
    original, model, heard = Outer.forward, Outer(), Heard()
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    hooks = install(heard)
    try:
        for _ in range(2):
            model.forward(tokens)
        model(tokens)
    finally:
        hooks.remove()
    # The first pass is noticed at its first submodule, where its inputs are not known.
    assert heard.passes == [("Outer", 0), ("Outer", 1), ("Outer", 1)]
    assert Outer.forward is original


def test_layers_that_are_called_one_by_one_have_the_names_of_their_model() -> None:
    model, watched = Outer(), WatchedModel()
    for layer in (model.stage.embed, model.stage.head):
        assert watched.add(layer)
        watched.learn(layer)
    watched.find_names(torch.optim.SGD(model.parameters(), lr=0.1))
    assert [shard.name for shard in watched.shards()] == [
        "stage.embed.weight",
        "stage.head.weight",
        "stage.head.bias",
    ]


def test_a_parameter_of_a_module_that_was_never_called_has_its_name() -> None:
    model, watched = Outer(), WatchedModel()
    watched.add(model.stage.embed)
    watched.find_names(torch.optim.SGD(model.parameters(), lr=0.1))
    assert "stage.head.bias" in [shard.name for shard in watched.shards()]
