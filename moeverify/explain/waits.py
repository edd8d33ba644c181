"""Follows which collectives a program knows to be done, since it waited for them or asked whether they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

_CALLS = (
    (dist.Work, ("wait", "is_completed", "get_future")),
    (torch._C.Future, ("wait", "done", "then")),
)
"""Functions that wait for a collective, ask whether it is done, or return a future of it."""


class Waits:
    """Calls `note` with each collective that the program knows to be done; `pause` is entered while gloo works on it.

    `in_callback` is the collective whose callback runs.
    """

    def __init__(
        self, note: Callable[[Any], None], pause: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._note, self._pause = note, pause
        self._works: dict[Any, Any] = {}
        self.in_callback: Any = None

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow the program while the block runs."""
        plain = [(owner, name, getattr(owner, name)) for owner, names in _CALLS for name in names]
        for owner, name, call in plain:
            setattr(owner, name, self._follow(owner, name, call))
        try:
            yield
        finally:
            for owner, name, call in plain:
                setattr(owner, name, call)
            self._works.clear()

    def _follow(self, owner: Any, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def followed(this: Any, *args: Any, **named: Any) -> Any:
            work = this if owner is dist.Work else self._works.get(this)
            if name == "then" and work is not None:
                args = (self._inside(work, args[0]), *args[1:])
            # gloo does a part of some collectives during the wait; callbacks belong to the program.
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
