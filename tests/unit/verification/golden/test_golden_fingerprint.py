"""Fingerprints are equal for values that are equal up to rounding, and differ for all other changes."""

from __future__ import annotations

import pytest
import torch

from moeverify.verification.golden import fingerprint as module
from moeverify.verification.golden.fingerprint import Fingerprints
from moeverify.verification.golden.proximity import distance


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(12, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def test_the_norm_comes_first(weight: torch.Tensor) -> None:
    print_ = Fingerprints().make(weight)
    assert len(print_) == 3
    assert print_[0] == pytest.approx(float(weight.norm()), rel=1e-12)


def test_rounding_is_near(weight: torch.Tensor) -> None:
    assert distance(Fingerprints().make(weight), Fingerprints().make(weight * (1 + 1e-15))) < 1e-12


def test_permutations_are_far_though_the_norm_is_equal(weight: torch.Tensor) -> None:
    experts = weight.reshape(4, 3, 10)
    for other in (
        weight.flip(0),
        weight.roll(1, 1),
        experts[[1, 0, 2, 3]].reshape(12, 10),
        weight.t().contiguous().reshape(12, 10),
        -weight,
    ):
        assert torch.allclose(other.norm(), weight.norm())
        assert distance(Fingerprints().make(weight), Fingerprints().make(other)) > 1e-3
    swapped = weight.clone()
    swapped[[2, 7], 4] = weight[[7, 2], 4]
    assert distance(Fingerprints().make(weight), Fingerprints().make(swapped)) > 1e-6


def test_whether_it_is_contiguous_does_not_matter(weight: torch.Tensor) -> None:
    assert Fingerprints().make(weight.t()) == Fingerprints().make(weight.t().contiguous())


def test_chunks_do_not_matter(weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Fingerprints().make(weight)
    monkeypatch.setattr(module, "CHUNK", 7)
    assert distance(whole, Fingerprints().make(weight)) < 1e-12


def test_tensors_share_the_signs_of_their_places(
    weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK", 7)
    tensors = [weight[:1], weight, weight[3:]]
    shared = Fingerprints()
    assert [shared.make(each) for each in tensors] == [Fingerprints().make(each) for each in tensors]


def test_integers_are_hashed() -> None:
    ids = torch.arange(20).reshape(4, 5)
    assert Fingerprints().make(ids) == Fingerprints().make(ids.to(torch.int32))
    assert isinstance(Fingerprints().make(ids), str)
    assert Fingerprints().make(ids) != Fingerprints().make(ids.flip(0))
    assert Fingerprints().make(ids.t()) == Fingerprints().make(ids.t().contiguous())
    assert Fingerprints().make(ids > 3) != Fingerprints().make(ids > 4)


def test_a_number_and_nothing() -> None:
    assert Fingerprints().make(torch.tensor(2.0))[0] == 2.0
    assert Fingerprints().make(torch.zeros(0)) == [0.0, 0.0, 0.0]
