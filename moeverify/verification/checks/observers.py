"""Observers of the checks, combined with the observer that compares or records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from moeverify.parallel.regions.observer import Named, Observer, show_all
from moeverify.parallel.regions.region import Region
from moeverify.verification.checks.base import Check, Training, Watch


class Unseen:
    """An observer that ignores everything, because the watches before it see all tensors."""

    def begin_step(self, step: int) -> None:
        """Do nothing."""

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Do nothing."""


class _Together:
    """An observer that forwards everything to several others, in order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def begin_step(self, step: int) -> None:
        for observer in self._observers:
            observer.begin_step(step)

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        for observer in self._observers:
            observer.observe(step, kind, name, local, region)

    def observe_all(self, step: int, kind: str, shown: Sequence[Named]) -> None:
        for observer in self._observers:
            show_all(observer, step, kind, shown)


@contextmanager
def open_observers(
    training: Training,
    observer: Observer,
    checks: Sequence[Check[Any]],
    watches: Sequence[Watch[Any]] = (),
) -> Iterator[Observer]:
    """Yield the observer to train with: the watches first, then the checks' own, then `observer`.

    The checks may show further tensors to `observer`.
    """
    shows = [show for check in checks if (show := check.show(training, observer)) is not None]
    with ExitStack() as stack:
        for each in (*shows, *watches):
            stack.callback(each.close)
        yield _Together([*watches, *shows, observer]) if shows or watches else observer
