"""Requests to many ranks at once: all are sent first, and each rank has until the deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from multiprocessing_pdb.console.link import LinkClosedError, wait
from multiprocessing_pdb.console.target import Target, read_number, read_text
from multiprocessing_pdb.wire.framing import Frame

Show = Callable[[Target, str], None]


@dataclass
class Answer:
    """The answer of a rank, or in `failure` the reason for its absence."""

    target: Target
    frame: Frame = field(default_factory=dict)
    failure: str = ""
    parts: list[str] = field(default_factory=list)

    @property
    def out(self) -> str:
        """All output of a debugger command."""
        return "".join([*self.parts, read_text(self.frame, "out")])


def ask(
    targets: Sequence[Target], request: Frame, seconds: float | None, show: Show | None = None
) -> list[Answer]:
    """Return one answer per target, in order. If `seconds` is None, wait without a limit.

    A rank that is slow, dead or refuses does not delay the others; its answer contains the failure. `show`
    receives the partial output of running commands, which is not repeated in the answer.
    """
    answers = {id(target): Answer(target) for target in targets}
    waiting: dict[int, tuple[Target, int]] = {}
    for target in targets:
        try:
            waiting[id(target)] = (target, target.ask(request))
        except LinkClosedError:
            answers[id(target)].failure = f"gone: {target.link.explain_close()}"
    deadline = None if seconds is None else time.monotonic() + seconds
    try:
        while waiting:
            left = 1.0 if deadline is None else deadline - time.monotonic()
            if left <= 0:
                break
            wait([target.link.channel for target, _ in waiting.values()], left)
            for target, number in list(waiting.values()):
                if collect(answers[id(target)], number, show):
                    del waiting[id(target)]
    finally:
        what = str(request.get("text") or request.get("do"))
        for target, number in waiting.values():
            target.give_up(number, what)
            if request.get("do") in ("evaluate", "hash", "compare"):
                target.cancel(number)
            answers[id(target)].failure = f"no answer in {seconds:g} s" if seconds else "no answer"
    return [answers[id(target)] for target in targets]


def collect(answer: Answer, number: int, show: Show | None) -> bool:
    """Process the frames received for one request; return whether its answer is complete or cannot come."""
    target = answer.target
    for frame in target.take(number):
        if "part" in frame:
            if show is not None:
                show(target, read_text(frame, "part"))
            else:
                answer.parts.append(read_text(frame, "part"))
            continue
        answer.frame = frame
        answer.failure = read_text(frame, "error")
        target.learn(frame)
        return True
    if target.link.closed:
        answer.failure = f"gone: {target.link.explain_close()}"
        return True
    return False


def explain_silence(answers: Iterable[Answer], seconds: float) -> None:
    """Ask each rank without an answer for its status.

    The server of a rank answers even if the rank is busy.
    """
    silent = [answer for answer in answers if answer.failure.startswith("no answer")]
    for answer, status in zip(
        silent, ask([a.target for a in silent], {"do": "status"}, seconds), strict=True
    ):
        if status.failure:
            answer.failure += (
                f", and none to a question about its state in {seconds:g} s: it hangs in C or is suspended"
            )
        else:
            lasting = read_number(status.frame, "lasting") or 0.0
            answer.failure += f": {read_text(status.frame, 'state')} for {lasting:.1f} s"
