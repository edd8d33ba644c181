"""Choice of the comparison on a device: asynchronous where kernels can be compiled, else immediate."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor

from moeverify.parallel.regions.region import Region
from moeverify.verification.compare import comparison
from moeverify.verification.compare.comparison import Comparison


class Golden:
    """A golden with one gradient that records its reads."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def read(self, step: int, kind: str, name: str, region: Region) -> Tensor | None:
        self.asked.append(name)
        return torch.ones(3) if name == "w" else None


def test_without_a_compiler_a_gpu_is_compared_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    measurer = comparison._choose_measurer(torch.device("cuda"), True)
    assert isinstance(measurer, comparison._ImmediateComparison)


def test_states_of_what_is_known_unknown_absent_and_zero() -> None:
    golden, whole = Golden(), Region.whole((3,))
    compared = Comparison(golden)
    compared.observe(0, "gradient", "w", torch.ones(3), whole)
    compared.observe(0, "gradient", "other", torch.ones(3), whole)
    compared.observe(0, "gradient", "w", None, whole)
    compared.observe(0, "router_flips", "w", torch.zeros(3), whole)
    compared.observe(0, "weight", "w", torch.ones(3), whole)
    entries = list(compared.entries())
    assert [entry.state for entry in entries] == ["compared", "unexpected", "absent", "compared"]
    assert [entry.difference.max_error for entry in entries] == [0.0, 1.0, 1.0, 0.0]
    assert golden.asked == ["w", "other", "w"]


def test_hashes_are_left_out_where_nobody_needs_them() -> None:
    for hash_bits in (True, False):
        compared = Comparison(Golden(), hash_bits=hash_bits)
        compared.observe(0, "gradient", "w", torch.ones(3), Region.whole((3,)))
        [entry] = compared.entries()
        assert (entry.bits != 0) == hash_bits
