"""Names of parameters that no module has."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moeverify.scripts.record.model import WatchedModel
from moeverify.scripts.record.variables import name_by_variables


class Trainer:
    """A trainer with a parameter, and a list of parameters, of its own."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(()))
        self.prompts = [nn.Parameter(torch.ones(2)) for _ in range(2)]

    def name(self, others: tuple[Tensor, ...] = ()) -> list[str | None]:
        wanted = [self.scale, *self.prompts, *others]
        found = name_by_variables(wanted)
        return [found.get(id(each)) for each in wanted]


def test_attributes_come_before_variables_and_containers() -> None:
    margin = nn.Parameter(torch.ones(()))
    trainer = Trainer()
    for parameter in (margin, trainer.scale):
        parameter.grad = torch.ones(())
    assert trainer.name((margin,)) == ["Trainer.scale", "Trainer.prompts.0", "Trainer.prompts.1", "margin"]


def test_a_name_that_two_parameters_share_names_none_of_them() -> None:
    first, second = Trainer(), Trainer()
    assert first.name((second.scale,))[0] is None
    assert second.name()[0] == "Trainer.scale"


def test_a_variable_with_the_name_of_a_models_parameter_is_named_by_its_group() -> None:
    model, weight, margin = nn.Linear(2, 2), nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))
    watched = WatchedModel()
    watched.add(model)
    watched.learn(model)
    watched.find_names(torch.optim.SGD([*model.parameters(), weight, margin], lr=0.1))
    assert [shard.name for shard in watched.shards()] == ["weight", "bias", "SGD.group0.2", "margin"]
