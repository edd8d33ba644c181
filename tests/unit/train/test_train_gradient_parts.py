"""The gradient of a loss by parameters, of which some are frozen."""

import torch

from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.parallel.regions.region import Region
from moeverify.train.gradient_parts import differentiate


def hold(name, *, is_trained=True):
    parameter = torch.nn.Parameter(torch.tensor([2.0, 3.0]), requires_grad=is_trained)
    return LocalShard(name, parameter, Region.whole((2,)))


def test_frozen_and_unused_parameters_have_a_gradient_of_zeros():
    trained, frozen, unused = hold("trained"), hold("frozen", is_trained=False), hold("unused")
    loss = (trained.tensor * frozen.tensor).sum()
    gradients = differentiate(loss, [frozen, trained, unused])
    assert {name: gradient.tolist() for name, gradient in gradients.items()} == {
        "frozen": [0.0, 0.0],
        "trained": [2.0, 3.0],
        "unused": [0.0, 0.0],
    }


def test_a_loss_of_frozen_parameters_alone_has_no_gradient():
    frozen = hold("frozen", is_trained=False)
    assert differentiate(frozen.tensor.sum(), [frozen])["frozen"].tolist() == [0.0, 0.0]
