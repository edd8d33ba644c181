"""Tracking of the collectives that a program knows to be complete: it waited for them or queried them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

Function = Callable[..., Any]

_CALLS = (
    (dist.Work, ("wait", "is_completed", "get_future")),
    (torch._C.Future, ("wait", "done", "then")),
)
"""Methods that wait for a collective, query its completion, or return a future of it."""


@contextmanager
def wrapped(
    calls: Iterable[tuple[Any, Sequence[str]]], wrap: Callable[[Any, str, Function], Function]
) -> Iterator[None]:
    """Replace functions of classes or modules during the block by `wrap(owner, name, function)`."""
    plain = [(owner, name, getattr(owner, name)) for owner, names in calls for name in names]
    for owner, name, call in plain:
        setattr(owner, name, wrap(owner, name, call))
    try:
        yield
    finally:
        for owner, name, call in plain:
            setattr(owner, name, call)


class Waits:
    """Calls `note` with each collective that the program knows to be complete.

    `pause` is entered during waits, in which gloo may do a part of a collective. `in_callback` is the
    collective whose callback is running.
    """

    def __init__(
        self, note: Callable[[Any], None], pause: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._note, self._pause = note, pause
        self._works: dict[Any, Any] = {}
        self.in_callback: Any = None

    @contextmanager
    def following(self) -> Iterator[None]:
        """Track the program's waits during the block."""
        with wrapped(_CALLS, self._follow):
            try:
                yield
            finally:
                self._works.clear()

    def _follow(self, owner: Any, name: str, call: Function) -> Function:
        def followed(this: Any, *args: Any, **named: Any) -> Any:
            work = this if owner is dist.Work else self._works.get(this)
            if name == "then" and work is not None:
                args = (self._inside(work, args[0]), *args[1:])
            # gloo executes a part of some collectives during the wait. Callbacks belong to the program.
            with self._pause() if owner is dist.Work and name == "wait" else nullcontext():
                returned = call(this, *args, **named)
            if work is not None and name in ("get_future", "then"):
                self._works[returned] = work
            elif work is not None and (name == "wait" or returned):
                self._note(work)
            return returned

        return followed

    def _inside(self, work: Any, callback: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a callback of a collective, which may use the memory of the collective."""

        def call(*args: Any) -> Any:
            before, self.in_callback = self.in_callback, work
            try:
                return callback(*args)
            finally:
                self.in_callback = before

        return call
