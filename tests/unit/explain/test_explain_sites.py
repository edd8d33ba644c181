"""The lines of user code from which a call comes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moeverify.explain.program import Site
from moeverify.explain.sites import MOST_SITES, find_sites, is_of_hook


def look() -> tuple[Site, ...]:
    return find_sites(2)


def test_the_innermost_line_comes_first() -> None:
    def inner() -> tuple[Site, ...]:
        return look()

    sites = inner()
    assert [site.function for site in sites[:2]] == [
        "inner",
        "test_the_innermost_line_comes_first",
    ]
    assert {site.file for site in sites[:2]} == {__file__}


def test_code_of_torch_is_left_out() -> None:
    found: list[tuple[Site, ...]] = []

    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found.append(look())
            return x

    nn.Sequential(Module())(torch.ones(1))
    assert [site.function for site in found[0][:2]] == ["forward", "test_code_of_torch_is_left_out"]


def test_what_autograd_calls_has_no_line() -> None:
    found: list[tuple[Site, ...]] = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.grad_fn.register_prehook(lambda gradients: found.append(find_sites()))  # type: ignore[union-attr]
    torch.autograd.backward(y.sum())
    assert found == [()]


def test_what_a_hook_of_fsdp_calls_has_the_line_of_fsdp() -> None:
    """FSDP divides and reduces gradients in hooks: these operators are no derivatives."""
    found: list[tuple[Site, ...]] = []
    path = f"{Path(torch.__file__).parent}/distributed/fsdp/collectives.py"
    names: dict[str, Any] = {"note": found.append, "find": find_sites}
    exec(compile("def reduce_gradients(gradient):\n    note(find(1))", path, "exec"), names)
    x = torch.ones(1, requires_grad=True)
    x.register_hook(names["reduce_gradients"])  # type: ignore[no-untyped-call]
    torch.autograd.backward(x.sum())
    assert is_of_hook(found[0])
    assert not is_of_hook(look())


def test_what_a_hook_of_the_user_calls_has_the_line_of_the_hook() -> None:
    found: list[tuple[Site, ...]] = []

    def hook(gradient: Tensor) -> None:
        found.append(look())

    x = torch.ones(1, requires_grad=True)
    x.register_hook(hook)  # type: ignore[no-untyped-call]
    torch.autograd.backward(x.sum())
    assert found[0][0].function == "hook"


def test_wrappers_are_no_places() -> None:
    @contextlib.contextmanager
    def manager() -> Iterator[tuple[Site, ...]]:
        yield look()

    with manager() as sites:
        assert [site.function for site in sites[:2]] == ["manager", "test_wrappers_are_no_places"]


@pytest.mark.parametrize("depth", [2, 20])
def test_the_number_of_lines_is_bounded(depth: int) -> None:
    def descend(left: int, then: Callable[[], tuple[Site, ...]]) -> tuple[Site, ...]:
        return then() if left == 0 else descend(left - 1, then)

    assert len(descend(depth, look)) == MOST_SITES


def test_calls_of_one_line_are_told_apart() -> None:
    one, two = look(), look()
    assert one[0].line == two[0].line
    assert one[0].offset != two[0].offset
    assert one[0].span != two[0].span
