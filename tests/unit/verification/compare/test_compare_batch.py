"""Many tensors measured and hashed at once: as if one by one, in their order, for any sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moeverify.verification.compare import batch
from moeverify.verification.compare.batch import BitFingerprints, Differences
from moeverify.verification.compare.difference import TensorDifference, fingerprint_bits, measure

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool]
SIZES = [
    1,
    3,
    3,
    3,
    64,
    0,
    0,
    9,
    2048,
    2049,
    7,
    7,
    1,
    1,
    1,
]  # consecutive ones are taken together


@pytest.fixture(params=[None, 16, 70], ids=["one room", "room of 16", "room of 70"])
def room(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """Set the memory limit: everything fits, or so little that the rest is measured alone or later."""
    size: int | None = request.param
    if size is not None:
        monkeypatch.setattr(batch, "_BUFFER_SIZE", size)
        monkeypatch.setattr(batch, "_SMALL", size)
    return size


def make_tensors(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(size, generator=generator) * 9).to(dtype) for size in SIZES]


@pytest.mark.parametrize("dtype", DTYPES)
def test_hashes_are_those_of_each_tensor_alone(dtype: torch.dtype, room: int | None) -> None:
    tensors = make_tensors(dtype)
    together = BitFingerprints()
    together.add_all(tensors)
    assert together.values().tolist() == [int(fingerprint_bits(tensor)) for tensor in tensors]


def test_differences_are_those_of_each_pair_alone(room: int | None) -> None:
    pairs = [(tensor, tensor.roll(1) + 0.5) for tensor in make_tensors(torch.float64)]
    together = Differences()
    together.add_all(pairs)
    rows = together.rows()
    assert rows.dtype is torch.float64
    for row, (expected, actual) in zip(rows.tolist(), pairs, strict=True):
        assert row == pytest.approx(measure(expected, actual).tolist(), rel=1e-13)


def test_without_expected_values_zeros_are_meant(room: int | None) -> None:
    together = Differences()
    for tensor in make_tensors(torch.float32):
        together.add(None, tensor)
    for row, tensor in zip(together.rows().tolist(), make_tensors(torch.float32), strict=True):
        assert row == pytest.approx(measure(torch.zeros_like(tensor), tensor).tolist(), rel=1e-13)


def test_what_changes_after_it_was_taken_does_not_matter() -> None:
    values = torch.ones(4, dtype=torch.float64)
    differences, hashes = Differences(), BitFingerprints()
    differences.add(values, values)
    hashes.add(values)
    before = int(fingerprint_bits(values))
    values += 1
    assert TensorDifference.from_statistics(differences.rows()[0].tolist()).sum_actual2 == 4.0
    assert hashes.values().tolist() == [before]


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_is_the_worst_and_stays_in_its_tensor(odd: float) -> None:
    clean = torch.arange(5, dtype=torch.float64)
    spoiled = clean.clone()
    spoiled[3] = odd
    together = Differences()
    for actual in (clean, spoiled, clean + 9):
        together.add(clean, actual)
    first, second, third = (TensorDifference.from_statistics(row) for row in together.rows().tolist())
    assert (first.num_nonfinite, first.relative_error) == (0.0, 0.0)
    assert (second.num_nonfinite, second.position, second.expected_at) == (1.0, 3.0, 3.0)
    assert second.relative_error == float("inf")
    assert (third.num_nonfinite, third.max_error, third.position) == (0.0, 9.0, 0.0)


def test_pairs_of_unequal_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(3,\) with \(2,\)"):
        Differences().add(torch.zeros(2), torch.zeros(3))


def test_nothing_gives_nothing() -> None:
    assert Differences().rows().shape == (0, 10)
    assert BitFingerprints().values().tolist() == []
