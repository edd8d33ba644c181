"""Job that makes missing goldens. Each golden is made on one rank; ranks work in parallel."""

from __future__ import annotations

import ctypes
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

import multiprocessing_pdb
from moeverify.cases.schema import Recipe
from moeverify.errors import CaseError, FormatError
from moeverify.parallel.regions.observer import INITIAL
from moeverify.train.target import describe_error, import_path
from moeverify.verification.golden.store import StoredGolden, is_stored, note_places, sweep
from moeverify.verification.golden_run.golden import make_golden
from moeverify.verification.jobs import (
    GoldenEnd,
    GoldenJob,
    GoldenOrder,
    GoldenResult,
    GoldenSummary,
    Refusal,
)
from moeverify.verification.launch.plan import write_atomically
from moeverify.verification.launch.runner import RankContext
from moeverify.verification.launch.single_rank_world import single_rank_world
from multiprocessing_pdb.rank.reference import ReferenceRow

_ANSWERS: TypeAdapter[GoldenSummary | Refusal] = TypeAdapter(GoldenSummary | Refusal)


def make_goldens(context: RankContext, job: GoldenJob) -> GoldenResult | None:
    """Make the goldens that are missing or damaged, each on one rank. Return their summaries on rank 0."""
    if context.rank == 0:
        for cache in {order.folder.parent for order in job.orders}:
            sweep(cache)
    told: set[int] = set()
    for number in range(context.rank, len(job.orders), context.world_size):
        order = job.orders[number]
        with import_path(order.search_path), single_rank_world(context.device):
            folder = find_folder(order.folder, context.device)
            answer = _make_one(order, folder, context.device, context.clock)
        context.store.set(_key(number), answer.model_dump_json())
        _report_ends(context, job, told)
    if context.rank != 0:
        return None
    texts = []
    for number in range(len(job.orders)):
        texts.append(context.store.get(_key(number)))
        _report_ends(context, job, told)
    found = tuple(_ANSWERS.validate_json(text) for text in texts)
    return GoldenResult(goldens=found, device_class=device_class(context.device))


def _key(number: int) -> str:
    return f"golden {number}"


def _report_ends(context: RankContext, job: GoldenJob, told: set[int]) -> None:
    """Report the goldens that ended on any rank and are not in `told`, and add them. Only rank 0 reports."""
    if context.rank != 0:
        return
    for number, order in enumerate(job.orders):
        if number not in told and context.store.check([_key(number)]):
            told.add(number)
            end = GoldenEnd(recipe=order.recipe.name, num_done=len(told), num_total=len(job.orders))
            context.report(end.model_dump_json())


class _NothingYet:
    """Reference of `diff --golden` while the golden is computed; see `multiprocessing_pdb.rank.reference`."""

    def compare(self, value: Any, check: Callable[[], None]) -> Sequence[ReferenceRow]:
        """Raise LookupError: there is no golden to compare with yet."""
        raise LookupError(
            "this rank computes the golden itself, as the one device: there is nothing to compare with until the"
            " layout trains"
        )


def _make_one(
    order: GoldenOrder, folder: Path, device: torch.device, clock: Callable[[], float]
) -> GoldenSummary | Refusal:
    recipe = order.recipe
    _error_file(folder).unlink(missing_ok=True)
    try:
        multiprocessing_pdb.set_reference(_NothingYet())
        with _limit(order.timeout, clock):
            return _have_one(order, folder, device)
    except _OverTimeError:
        text = f"one device did not compute the golden of {recipe.name} within {order.timeout or 0.0:g} s"
        return _note_error(folder, f"{text}; raise --timeout or checks.timeout")
    except CaseError as error:
        return _note_error(folder, str(error))
    except Exception as error:
        if not recipe.functions:
            raise
        text = f"one device cannot train `{recipe.model.title}`: {describe_error(error)}"
        return _note_error(folder, text)
    finally:
        multiprocessing_pdb.set_reference(None)


def _have_one(order: GoldenOrder, folder: Path, device: torch.device) -> GoldenSummary:
    """Return the summary of a stored golden. Make the golden first if it is missing or damaged."""
    damage = "" if order.fresh else find_damage(order.recipe, folder)
    seconds = None
    if order.fresh or damage or not is_stored(folder):
        began = time.monotonic()
        make_golden(order.recipe, folder, device, also=order.also, sketch=order.sketch)
        seconds = time.monotonic() - began
        if order.recipe.functions:
            note_places(folder, order.search_path)
    summary = GoldenSummary.model_validate(StoredGolden(folder).summary)
    return summary.model_copy(update={"damage": damage, "seconds": seconds})


class _OverTimeError(BaseException):
    """Timeout of a golden. It is not an Exception, so that a user's model does not catch it."""


@contextmanager
def _limit(seconds: float | None, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Interrupt the block after `seconds` of a clock, unless it blocks where signals do not reach Python.

    Raises: _OverTimeError.
    """
    if seconds is None:
        yield
        return
    end = clock() + seconds
    if threading.current_thread() is not threading.main_thread():
        with _limit_thread(lambda: end - clock()):
            yield
        return

    def interrupt(number: int, frame: object) -> None:
        left = end - clock()
        if left <= 0.0:
            raise _OverTimeError
        signal.setitimer(signal.ITIMER_REAL, left)

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _limit_thread(find_left: Callable[[], float]) -> Iterator[None]:
    """Apply the same limit in a thread, which gets no signals: raise the error at its next line of Python."""
    ident = ctypes.c_ulong(threading.get_ident())
    is_over = Event()

    def interrupt() -> None:
        while (left := find_left()) > 0.0:
            if is_over.wait(left):
                return
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(_OverTimeError))

    timer = threading.Thread(target=interrupt, daemon=True)
    timer.start()
    try:
        yield
    finally:
        # A timer that fires at the very end cannot be cancelled any more. Its error is caught here, so that
        # it does not hit later code. Do not withdraw it with `PyThreadState_SetAsyncExc(ident, None)`:
        # CPython 3.11 then believes forever that an exception is pending, and a traced thread (as under a
        # debugger) never enters a function again (RESUME in ceval.c).
        with suppress(_OverTimeError):
            is_over.set()
            timer.join()
            for _ in range(100):  # Python checks for asynchronous exceptions at the end of a loop body
                pass


def find_damage(recipe: Recipe, folder: Path) -> str:
    """Return a description of the damage to a stored golden; empty if it is intact or does not exist."""
    if not is_stored(folder):
        return ""
    try:
        golden = StoredGolden(folder)
        golden.verify(range(INITIAL, recipe.steps))
        GoldenSummary.model_validate(golden.summary)
    except FormatError as error:
        return error.problem
    except ValidationError as error:
        return f"{folder}: its summary is none ({error.error_count()} wrong fields)"
    return ""


def _note_error(folder: Path, text: str) -> Refusal:
    """Write the error beside the golden's folder, so that no other case tries to make this golden again."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(_error_file(folder), text)
    return Refusal(error=text)


def read_error(folder: Path) -> str:
    """Return the error of the last attempt to make the golden of this folder, or an empty string."""
    try:
        return _error_file(folder).read_text()
    except FileNotFoundError:
        return ""


def _error_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.error")


def find_folder(folder: Path, device: torch.device) -> Path:
    """Return the folder of the golden for this kind of device. It need not exist."""
    return folder.with_name(f"{folder.name}-{device_class(device)}")


def device_class(device: torch.device) -> str:
    """Return the name of the kind of device. Goldens of different kinds differ in rounding."""
    if device.type == "cpu":
        return "cpu"
    return re.sub(r"[^A-Za-z0-9]+", "-", torch.cuda.get_device_name(device)).strip("-").lower()
