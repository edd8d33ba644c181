"""Statistics of a difference: merged shards equal the whole, and the hash detects every bit."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from moeverify.verification.compare import difference as module
from moeverify.verification.compare.difference import TensorDifference, fingerprint_bits, measure


def difference(expected: Tensor, actual: Tensor) -> TensorDifference:
    return TensorDifference.from_statistics(measure(expected, actual).tolist())


@pytest.fixture
def pair(weight: Tensor) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return weight, weight * 1.5 + 0.01 * torch.randn(8, 6, dtype=torch.float64, generator=generator)


def test_numbers_are_those_of_the_definitions(pair: tuple[Tensor, Tensor]) -> None:
    expected, actual = pair
    found = difference(expected, actual)
    error = (actual - expected).abs()
    assert found.count == 48
    assert found.relative_error == pytest.approx(
        float((actual - expected).norm() / expected.norm()), rel=1e-14
    )
    assert found.scale == pytest.approx(float((expected * actual).sum() / (expected**2).sum()), rel=1e-14)
    cosine = torch.nn.functional.cosine_similarity(expected.reshape(-1), actual.reshape(-1), dim=0)
    assert found.cosine == pytest.approx(float(cosine), rel=1e-14)
    assert found.max_error == float(error.max())
    assert found.position == int(error.argmax())
    assert found.expected_at == expected.reshape(-1)[error.argmax()]
    assert found.actual_at == actual.reshape(-1)[error.argmax()]


def test_merged_parts_are_the_whole(pair: tuple[Tensor, Tensor]) -> None:
    expected, actual = pair
    whole = difference(expected, actual)
    parts = [difference(e, a) for e, a in zip(expected.split(3), actual.split(3), strict=True)]
    for order in itertools.permutations(parts):
        merged = order[0].merge(order[1]).merge(order[2])
        for name in ("count", "max_error", "expected_at", "actual_at", "num_nonfinite"):
            assert getattr(merged, name) == getattr(whole, name)
        for name in ("sum_expected2", "sum_actual2", "sum_product", "sum_error2"):
            assert getattr(merged, name) == pytest.approx(getattr(whole, name), rel=1e-14)


def test_chunks_are_the_whole(pair: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    expected, actual = pair
    actual[7, 3] += 9.0  # the largest error is in the last chunk, and not at its first element
    whole, bits = difference(expected, actual), fingerprint_bits(actual)
    monkeypatch.setattr(module, "_CHUNK", 7)
    chunked = difference(expected, actual)
    assert chunked.statistics() == pytest.approx(whole.statistics(), rel=1e-14)
    assert chunked.position == whole.position
    assert fingerprint_bits(actual) == bits


def test_statistics_go_there_and_back(pair: tuple[Tensor, Tensor]) -> None:
    found = difference(*pair)
    assert TensorDifference.from_statistics(found.statistics()) == found


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_an_infinite_error(value: float, weight: Tensor) -> None:
    actual = weight.clone()
    actual[5, 2] = value
    found = difference(weight, actual)
    assert found.num_nonfinite == 1
    assert found.relative_error == math.inf
    clean = difference(weight, weight)
    assert found.merge(clean).relative_error == clean.merge(found).relative_error == math.inf


def test_a_zero_golden() -> None:
    zero, one = torch.zeros(3), torch.tensor([0.0, 1e-30, 0.0])
    assert difference(zero, zero).relative_error == 0.0
    found = difference(zero, one)
    assert found.relative_error == math.inf
    assert (found.scale, found.cosine) == (None, None)
    assert difference(one, zero).relative_error == pytest.approx(1.0)


def test_sums_are_taken_in_float64() -> None:
    expected = torch.full((1000,), 1.0, dtype=torch.bfloat16)
    actual = torch.full((1000,), 1.0078125, dtype=torch.bfloat16)
    assert difference(expected, actual).relative_error == pytest.approx(2**-7, rel=1e-12)


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"cannot compare shape \(2,\) with \(2, 1\)"):
        measure(torch.zeros(2, 1), torch.zeros(2))


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_equal_values_are_equal(dtype: torch.dtype) -> None:
    values = (torch.arange(40).reshape(8, 5) % 3).to(dtype)
    assert fingerprint_bits(values) == fingerprint_bits(values.t().contiguous().t())
    assert fingerprint_bits(values) == fingerprint_bits(values.clone())


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_notice_a_permutation_and_a_shift(dtype: torch.dtype) -> None:
    values = (torch.arange(40) % 2).to(dtype)
    swapped = values.clone()
    swapped[[10, 11]] = values[[11, 10]]
    assert len({int(fingerprint_bits(each)) for each in (values, swapped, values.roll(1))}) == 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 3, 8, 13])
def test_bits_do_not_depend_on_where_the_values_lie(dtype: torch.dtype, size: int) -> None:
    values = (torch.arange(40) * 7 % 5).to(dtype)
    for start in range(8):
        part = values[start : start + size]
        assert fingerprint_bits(part) == fingerprint_bits(part.clone())
        changed = part.clone()
        changed[-1] = ~changed[-1] if dtype is torch.bool else changed[-1] + 1
        assert fingerprint_bits(part) != fingerprint_bits(changed)


def test_bits_notice_an_exchange_with_what_is_left_over() -> None:
    # Eight bytes are hashed at a time, and here one element remains.
    for dtype, gap in ((torch.float32, 1), (torch.bfloat16, 3)):
        values = torch.tensor([1.0, *[0.0] * gap, 2.0], dtype=dtype)
        assert fingerprint_bits(values) != fingerprint_bits(values.flip(0))


def test_bits_notice_the_sign_of_zero_and_the_last_place() -> None:
    zero = torch.zeros(4, dtype=torch.float64)
    signed = zero.clone()
    signed[2] = -0.0
    one = torch.ones(4)
    nudged = one.clone()
    nudged[3] = torch.nextafter(one[3], torch.tensor(2.0))
    assert fingerprint_bits(zero) != fingerprint_bits(signed)
    assert fingerprint_bits(one) != fingerprint_bits(nudged)


def test_the_hash_takes_unaligned_views() -> None:
    flat = torch.arange(20, dtype=torch.float32)
    for start in range(3):
        view = flat[start : start + 13]
        assert int(fingerprint_bits(view)) == int(fingerprint_bits(view.clone()))


def test_a_nan_stays_the_worst_whatever_comes_after_it():
    expected = torch.zeros(100_000, dtype=torch.float64)
    actual = expected.clone()
    actual[5], actual[-1] = torch.nan, 7.0
    difference = TensorDifference.from_statistics(measure(expected, actual).tolist())
    assert difference.num_nonfinite == 1
    assert difference.relative_error == float("inf")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int32, torch.uint8])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 1003])
def test_few_words_hash_as_many(monkeypatch, dtype, size):
    values = (torch.randn(size) * 100).abs().to(dtype)
    few = fingerprint_bits(values)
    monkeypatch.setattr("moeverify.verification.compare.difference._FEW", -1)
    assert fingerprint_bits(values) == few
