"""What scores of attention are multiplied by where a scale is made of another size."""

from __future__ import annotations

import pytest
import torch

from moeverify.diagnose.replay.scores import Sizes, list_scales
from moeverify.results.change import Change

SIZES = Sizes(width=24, values=16, rotated=8, hidden=56, num_heads=8, num_kv_heads=2)


@pytest.mark.parametrize(
    ("way", "divisor"),
    [
        ("width", 24.0**2),
        ("value-width", 16.0),
        ("rotated-width", 8.0),
        ("unrotated-width", 16.0),
        ("all-heads", 192.0),
        ("hidden-width", 56.0),
        ("hidden-share", 7.0),
        ("kv-width", 48.0),
        ("none", 1.0),
        ("multiplied", 1.0 / 24.0),
    ],
)
def test_a_scale_is_one_over_the_root_of_another_size(way: str, divisor: float) -> None:
    change = Change(part="scale", way=way)
    assert change in list_scales(4)
    assert SIZES.find_scale(change, torch.arange(4)) == pytest.approx(divisor**-0.5)


def test_a_head_that_is_rotated_throughout_has_no_other_width() -> None:
    whole = Sizes(width=8, values=8, rotated=8, hidden=32, num_heads=4, num_kv_heads=4)
    for way in ("unrotated-width", "hidden-share"):
        change = Change(part="scale", way=way)
        assert whole.find_scale(change, torch.arange(4)) == whole.find_scale(None, torch.arange(4))
