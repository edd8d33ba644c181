"""Shards compared during training: as if one by one, for any sizes, and without waiting."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

from moeverify.verification.compare.difference import Measured, fingerprint_bits, measure

pytestmark = pytest.mark.slow  # on a CPU the kernels run in Triton's interpreter

SHAPES = [(), (1,), (0, 3), (7,), (33, 5), (6, 500), (3, 1501), (9000,), (513,)]
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def module() -> ModuleType:
    pytest.importorskip("triton")
    return importlib.import_module("moeverify.verification.compare.gpu.async_compare")


@pytest.fixture(params=[1 << 14, 1 << 23], ids=["small batches", "one batch"])
def compare(
    request: pytest.FixtureRequest, module: ModuleType, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[Measured]]:
    """Return a function that compares pairs on the device, and overwrites the added tensors at once."""
    staging = importlib.import_module("moeverify.verification.compare.gpu.staging")
    monkeypatch.setattr(staging, "_VALUES", request.param)

    def do(pairs: list[tuple[Tensor | None, Tensor]]) -> list[Measured]:
        comparison = module.AsyncComparison(device)
        for expected, actual in pairs:
            given = actual.to(device, copy=True)
            comparison.add_all([(lambda expected=expected: expected, given)])
            given.zero_()
        return list(comparison.results())

    return do


def make(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 9).to(dtype)


def check(found: list[Measured], pairs: list[tuple[Tensor | None, Tensor]]) -> None:
    for measured, (expected, actual) in zip(found, pairs, strict=True):
        wanted = measure(torch.zeros_like(actual) if expected is None else expected, actual)
        assert measured.statistics == pytest.approx(wanted.tolist(), rel=1e-12)
        assert measured.bits == int(fingerprint_bits(actual))
        assert measured.known == (expected is not None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_shard_is_measured_and_hashed_as_alone(
    compare: Callable[..., list[Measured]], dtype: torch.dtype
) -> None:
    wide = torch.float64 if dtype.is_floating_point else dtype
    pairs = [(make(shape, wide, 1), make(shape, dtype, 2)) for shape in SHAPES]
    check(compare(pairs), pairs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_single_tensor_has_the_same_hash_from_the_kernel(
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = importlib.import_module("moeverify.verification.compare.gpu.hash_kernel")
    monkeypatch.setattr(kernels, "WORDS", kernels.LANES)  # so that a tensor has many spans
    wide = torch.float64 if dtype.is_floating_point else dtype
    values = [make(shape, wide, 2).to(dtype) for shape in SHAPES]
    expected = [int(fingerprint_bits(each)) for each in values]
    monkeypatch.setattr("moeverify.verification.compare.difference.can_compile", lambda device: True)
    assert [int(fingerprint_bits(each.to(device))) for each in values] == expected


def test_dtypes_of_both_sides_may_change_from_shard_to_shard(compare: Callable[..., list[Measured]]) -> None:
    pairs = [
        (make(shape, other, 1), make(shape, dtype, 2))
        for shape in SHAPES[2:6]
        for other in FLOATS[:2]
        for dtype in FLOATS[1:3]
    ]
    check(compare(pairs), pairs)


def test_expected_values_may_be_a_part_of_something_larger(compare: Callable[..., list[Measured]]) -> None:
    whole = make((40, 6, 50), torch.float64, 1)
    parts = [whole[:, 2:4], whole[3:9], whole[:, :, 7:9], whole.transpose(0, 2), whole[5, 2:, 1:]]
    pairs = [(part, make(tuple(part.shape), torch.float32, 2)) for part in parts]
    check(compare(pairs), pairs)


def test_without_expected_values_zeros_are_meant(compare: Callable[..., list[Measured]]) -> None:
    pairs = [
        (None if number % 2 else make(shape, torch.float64, 1), make(shape, torch.float32, 2))
        for number, shape in enumerate(SHAPES)
    ]
    check(compare(pairs), pairs)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter's arithmetic
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_is_the_worst_and_stays_in_its_shard(
    compare: Callable[..., list[Measured]], odd: float
) -> None:
    clean = torch.arange(5000, dtype=torch.float64)
    spoiled = clean.clone()
    spoiled[3456] = odd
    first, second, third = compare([(clean, clean), (clean, spoiled), (clean, clean + 1)])
    assert (first.statistics[5], first.statistics[9]) == (0.0, 0.0)
    assert (second.statistics[6], second.statistics[9]) == (3456.0, 1.0)
    assert (third.statistics[5], third.statistics[9]) == (1.0, 0.0)


def test_copies_never_take_more_memory_than_they_may(
    module: ModuleType, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SHARE", 0.0)
    monkeypatch.setattr(module, "_LEAST", 1 << 12)
    comparison = module.AsyncComparison(device)
    pairs = [(make((400,), torch.float64, seed), make((400,), torch.float64, seed + 1)) for seed in range(9)]
    for expected, actual in pairs:
        comparison.add_all([(lambda expected=expected: expected, actual.to(device))])
        assert comparison._copied <= 1 << 12
    check(list(comparison.results()), pairs)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_what_cannot_be_read_is_told(module: ModuleType, device: torch.device, number: int) -> None:
    def fail() -> Tensor:
        raise ValueError("the file is gone")

    comparison = module.AsyncComparison(device)

    def go() -> Iterator[Measured]:
        for index in range(3):
            comparison.add_all(
                [(fail if index == number else lambda: torch.zeros(3), torch.zeros(3, device=device))]
            )
        return comparison.results()

    with pytest.raises(ValueError, match="the file is gone"):
        list(go())


def test_shapes_that_differ_are_told(module: ModuleType, device: torch.device) -> None:
    comparison = module.AsyncComparison(device)
    comparison.add_all([(lambda: torch.zeros(2), torch.zeros(3, device=device))])
    with pytest.raises(ValueError, match=r"cannot compare shape \(3,\) with \(2,\)"):
        list(comparison.results())


def test_nothing_was_observed(module: ModuleType, device: torch.device) -> None:
    assert list(module.AsyncComparison(device).results()) == []


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_nothing_waits_for_a_gpu_while_shards_are_added() -> None:
    from moeverify.verification.compare.gpu.async_compare import AsyncComparison

    comparison = AsyncComparison(torch.device("cuda"))
    pairs = [
        (make((1 << 16,), torch.float64, seed), make((1 << 16,), torch.float32, seed + 1))
        for seed in range(40)
    ]
    given = [actual.cuda() for _, actual in pairs]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for (expected, _), actual in zip(pairs, given, strict=True):
            comparison.add_all([(lambda expected=expected: expected, actual)])
        found = list(comparison.results())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check(found, pairs)
