"""Observers of checks: they see everything before the comparison does, and then release the model."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from moeverify.parallel.regions.observer import Observer
from moeverify.parallel.regions.region import Region
from moeverify.results.checks import CheckName
from moeverify.verification.checks.base import Check, CheckOutcome, ShownTensors, Training, Watch
from moeverify.verification.checks.observers import open_observers

NOWHERE = cast(Training, None)
WHOLE = Region.whole((2,))


class Log(Watch[None]):
    """An observer that records its calls."""

    def __init__(self, name: str, lines: list[str]) -> None:
        self._name = name
        self._lines = lines

    def begin_step(self, step: int) -> None:
        self._lines.append(f"{self._name} begins {step}")

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        self._lines.append(f"{self._name} sees {kind}")

    def close(self) -> None:
        self._lines.append(f"{self._name} closes")


class Doubles(Check[None]):
    """An observer that shows each tensor a second time, as a kind of its own."""

    name = CheckName.LOSS

    def show(self, training: Training, observer: Observer) -> Watch[Any]:
        class Shows(Watch[None]):
            def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
                observer.observe(step, f"double {kind}", name, local, region)

        return Shows()

    def judge(self, shown: ShownTensors, reports: Any) -> CheckOutcome | None:
        return None


class Silent(Doubles):
    """An observer that shows nothing."""

    def show(self, training: Training, observer: Observer) -> None:  # type: ignore[override]
        return None


def test_watches_hear_first_and_what_is_shown_goes_to_the_observer_alone() -> None:
    lines: list[str] = []
    target, watch = Log("target", lines), Log("watch", lines)
    with open_observers(NOWHERE, target, [Doubles()], [watch]) as observer:
        observer.begin_step(0)
        observer.observe(0, "loss", "total", torch.zeros(2), WHOLE)
    assert lines == [
        "watch begins 0",
        "target begins 0",
        "watch sees loss",
        "target sees double loss",
        "target sees loss",
        "watch closes",
    ]


def test_without_anything_to_watch_the_observer_is_itself() -> None:
    target = Log("target", [])
    with open_observers(NOWHERE, target, [Silent()]) as observer:
        assert observer is target


def test_what_watches_is_closed_when_the_run_breaks_off() -> None:
    lines: list[str] = []
    with (
        pytest.raises(ZeroDivisionError),
        open_observers(NOWHERE, Log("target", lines), [], [Log("watch", lines)]),
    ):
        raise ZeroDivisionError
    assert lines == ["watch closes"]
