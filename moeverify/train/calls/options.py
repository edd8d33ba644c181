"""The lines that set an optimizer's options, such as its learning rate."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch.optim import Optimizer

from moeverify.train.calls.listener import describe_frame, find_site, is_inner_file


class TracedGroup(dict[str, Any]):
    """A parameter group that keeps the line of the script which last set each of its options."""

    def __init__(self, group: dict[str, Any]) -> None:
        super().__init__(group)
        self.sites: dict[str, str] = {}

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self.sites[name] = _find_computation() or find_site()

    def update(self, *values: Any, **named: Any) -> None:
        """Set options, and keep their lines."""
        for name, value in dict(*values, **named).items():
            self[name] = value


# For each scheduler that runs: the numbers that functions of the script returned, and the lines.
_returned: list[list[tuple[float, str]]] = []


def _find_computation() -> str:
    """Return the line that returned the last number to a scheduler, or an empty string.

    A lambda may return the number of the function that computed it.
    """
    seen = _returned[-1] if _returned else []
    same = itertools.takewhile(lambda each: each[0] == seen[-1][0], reversed(seen))
    return list(same)[-1][1] if seen else ""


def trace_group(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an `Optimizer.add_param_group` whose groups keep the lines that set their options."""

    @functools.wraps(original)
    def add(optimizer: Optimizer, group: dict[str, Any]) -> None:
        original(optimizer, group)
        traced = TracedGroup(optimizer.param_groups[-1])
        traced.sites = dict.fromkeys(traced, find_site())
        optimizer.param_groups[-1] = traced

    return add


def find_option_sites(group: dict[str, Any]) -> dict[str, str]:
    """Return the lines that last set the options of a parameter group; empty if they are unknown."""
    return dict(group.sites) if isinstance(group, TracedGroup) else {}


@contextmanager
def computing() -> Iterator[None]:
    """Keep the lines where functions of the script return numbers while a scheduler runs.

    Leaves a profiler of the script alone, and also the profiler of a scheduler that steps this one.
    """
    if sys.getprofile() is not None:
        yield
        return
    seen: list[tuple[float, str]] = []
    _returned.append(seen)

    def see(frame: FrameType, event: str, value: object) -> None:
        if event != "return" or isinstance(value, bool) or not isinstance(value, int | float):
            return
        if not is_inner_file(frame.f_code.co_filename):
            seen.append((float(value), describe_frame(frame)))

    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(None)
        _returned.pop()
