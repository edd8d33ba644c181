"""Saves on two forked ranks, each interrupted in some way, and the resulting files, as JSON.

Torch is imported once. The ranks of each trial are forked from here and end by a signal or by `_exit`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moeverify.errors import FormatError
from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.parallel.regions.region import Region
from moeverify.tools.checkpoint import writer
from moeverify.tools.checkpoint.load import load
from moeverify.tools.checkpoint.manifest import MANIFEST
from moeverify.tools.checkpoint.save import save, save_async

NUM_RANKS = 2
NUM_TENSORS = 6
ROWS, COLUMNS = 10, 4096
FACTS = {"recipe": "abc"}
OLD, NEW = "step-1", "step-2"

End = Callable[[int], None]
"""Action on a rank, by its number, at a moment of its save."""


def make_tensors(step: int, rank: int) -> list[LocalShard]:
    """Return a rank's tensors after a step: uneven halves of some tensors, and one that both hold."""
    rows = range(6) if rank == 0 else range(6, ROWS)
    held = []
    for number in range(NUM_TENSORS):
        generator = torch.Generator().manual_seed(100 * step + number)
        whole = torch.randn(ROWS, COLUMNS, generator=generator)
        region = Region.box(whole.shape, [rows, range(COLUMNS)])
        held.append(LocalShard(f"weight/{number}", region.take(whole).clone(), region))
    return [*held, LocalShard("buffer/counter", torch.tensor(float(step)), Region.whole(()))]


def run_ranks(act: Callable[[int], Any], folder: Path) -> list[Any]:
    """Return the result of `act` from each rank: JSON data, or how the rank ended."""
    store = folder / f"store-{time.monotonic_ns()}"
    children = []
    for rank in range(NUM_RANKS):
        answer = folder / f"answer-{rank}.json"
        answer.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            run_rank(act, rank, store, answer)
        children.append(child)
    shown = []
    for rank, child in enumerate(children):
        _, status = os.waitpid(child, 0)
        answer = folder / f"answer-{rank}.json"
        if answer.exists():
            shown.append(json.loads(answer.read_text()))
        else:
            shown.append({"signal": os.WTERMSIG(status)} if os.WIFSIGNALED(status) else {"exit": status})
    return shown


def run_rank(act: Callable[[int], Any], rank: int, store: Path, answer: Path) -> None:
    """Run one rank and end its process."""
    signal.alarm(100)  # a rank that waits for a dead one would wait forever
    try:
        limit = timedelta(seconds=40)
        dist.init_process_group("gloo", f"file://{store}", timeout=limit, world_size=NUM_RANKS, rank=rank)
        result = act(rank)
        content = json.dumps(result)
    except BaseException:
        content = json.dumps({"broken": traceback.format_exc()})
    answer.with_suffix(".part").write_text(content)
    answer.with_suffix(".part").rename(answer)
    os._exit(0)


def try_save(folder: Path, rank: int, how: str) -> dict[str, str]:
    """Save the second state and return the outcome."""
    saving = None
    try:
        if how == "in the background":
            group = dist.new_group(backend="gloo")
            assert isinstance(group, dist.ProcessGroup)
            saving = save_async(folder / NEW, make_tensors(2, rank), FACTS, group)
            saving.wait()
        else:
            save(folder / NEW, make_tensors(2, rank), FACTS)
    except BaseException as error:
        if saving is not None:  # work in the background can do harm too
            saving._future.exception(timeout=50)
        return {"error": type(error).__name__, "text": str(error)}
    return {}


def compare(folder: Path, rank: int, name: str, step: int) -> str:
    """Load a checkpoint and return its problems. Tensors that were not loaded must be unchanged."""
    tensors = [
        LocalShard(held.name, torch.full_like(held.tensor, 7.0), held.region)
        for held in make_tensors(0, rank)
    ]
    try:
        load(folder / name, tensors, recipe="abc")
    except FormatError as error:
        touched = [held.name for held in tensors if bool((held.tensor != 7.0).any())]
        return f"changed {touched} by a load that failed" if touched else str(error)
    wrong = [
        held.name
        for held, wanted in zip(tensors, make_tensors(step, rank), strict=True)
        if not torch.equal(held.tensor, wanted.tensor)
    ]
    return f"other values in {wrong}" if wrong else ""


def hash_files(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def try_out(
    root: Path, act: Callable[[int], Any], free: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Save one checkpoint, then run `act` on the ranks, an interrupted save. Returns the resulting files."""
    folder, work = root / "checkpoints", root / "work"
    work.mkdir(parents=True)
    folder.mkdir(exist_ok=True)

    def begin_and_act(rank: int) -> Any:
        save(folder / OLD, make_tensors(1, rank), FACTS)
        if rank == 0:
            (work / "hash").write_text(hash_files(folder / OLD))
        dist.barrier()
        return act(rank)

    def look(rank: int) -> dict[str, Any]:
        found: dict[str, Any] = {"old": compare(folder, rank, OLD, 1), "new": compare(folder, rank, NEW, 2)}
        dist.barrier()
        if NEW not in listed:
            found["again"] = try_save(folder, rank, "at once").get("text") or compare(folder, rank, NEW, 2)
        return found

    ended = run_ranks(begin_and_act, work)
    same = hash_files(folder / OLD) == (work / "hash").read_text()
    # The manifest is written last: an interrupted save has none.
    listed = [path.parent.name for path in folder.glob(f"[!.]*/{MANIFEST}")]
    free()
    seen = run_ranks(look, work)
    left = sorted(path.name for path in folder.iterdir())
    return {"ended": ended, "is old the same": same, "listed": listed, "seen": seen, "left": left}


def kill(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt(_: int) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    if threading.current_thread() is not threading.main_thread():
        time.sleep(0.3)  # the main thread has it now and removes the files


def end_in_data(end: End, rank: int) -> None:
    """End the save when half of a rank's tensors are written."""
    original, done = writer._write_tensor, 0

    def write(file: Any, tensor: torch.Tensor) -> int:
        nonlocal done
        done += 1
        if done == NUM_TENSORS // 2:
            file.flush()
            end(rank)
        return original(file, tensor)

    writer._write_tensor = write


def end_before_plan(end: End, rank: int) -> None:
    """End the save when the partial folder exists and is empty."""
    original = writer.SafeWriter.prepare_global_plan

    def prepare(self: Any, plans: Any) -> Any:
        end(rank)
        return original(self, plans)

    # Only rank 0 makes the global plan; another rank ends where its own plan begins.
    if rank == 0:
        writer.SafeWriter.prepare_global_plan = prepare  # type: ignore[method-assign]
    else:
        writer.SafeWriter.prepare_local_plan = lambda self, plan: prepare(self, [plan])[0]  # type: ignore[method-assign]


def end_after_data(end: End, rank: int) -> None:
    """End the save after a rank's file is on disk, before any other rank knows."""
    original = writer.write_boxes

    def write(*args: Any) -> Any:
        results = original(*args)
        end(rank)
        return results

    writer.write_boxes = write


def end_before_name(end: End, rank: int) -> None:
    """End the save when everything is on disk, including the manifest, before the rename."""
    original = writer.sync_folder

    def sync(folder: Path) -> None:
        original(folder)
        if folder.name.endswith(".partial"):
            end(rank)

    writer.sync_folder = sync


def end_after_name(end: End, rank: int) -> None:
    """End the save after the rename: the checkpoint is complete."""
    original = writer.sync_folder

    def sync(folder: Path) -> None:
        if not folder.name.endswith(".partial"):
            end(rank)
        original(folder)

    writer.sync_folder = sync


MOMENTS: Mapping[str, tuple[Callable[[End, int], None], tuple[int, ...]]] = {
    "before the plan": (end_before_plan, (0, 1)),
    "in the data": (end_in_data, (0, 1)),
    "after the data": (end_after_data, (0, 1)),
    "before the name": (end_before_name, (0,)),
    "after the name": (end_after_name, (0,)),
}


def save_and_end(
    folder: Path, how: str, end: End, moment: Callable[[End, int], None], ranks: tuple[int, ...]
) -> Callable[[int], Any]:
    def act(rank: int) -> Any:
        if rank in ranks:
            moment(end, rank)
        return try_save(folder, rank, how)

    return act


def kill_at_moments(root: Path) -> dict[str, Any]:
    """Return the files after `kill -9` of each rank at each moment."""
    found = {}
    for how in ("at once", "in the background"):
        for name, (moment, ranks) in MOMENTS.items():
            for rank in ranks:
                title = f"kill -9 of rank {rank} {name}, {how}"
                place = root / title.replace(" ", "-")
                act = save_and_end(place / "checkpoints", how, kill, moment, (rank,))
                found[title] = try_out(place, act)
    return found


def interrupt_at_moments(root: Path) -> dict[str, Any]:
    """Return the files after Ctrl-C on one rank or on both."""
    found = {}
    for how in ("at once", "in the background"):
        for name in ("in the data", "before the name"):
            for ranks in ((0,), (0, 1)):
                title = f"Ctrl-C on {len(ranks)} of 2 ranks {name}, {how}"
                place = root / title.replace(" ", "-")
                act = save_and_end(place / "checkpoints", how, interrupt, MOMENTS[name][0], ranks)
                found[title] = try_out(place, act)
    return found


def kill_at_any_time(root: Path) -> dict[str, Any]:
    """Return the files after an external kill of a rank, at times spread over the duration of a save."""
    found = {}
    for number in range(8):
        delay = 2**number / 1000
        place = root / f"any-{number}"

        def act(rank: int, place: Path = place, number: int = number, delay: float = delay) -> Any:
            dist.barrier()
            if rank == number % 2:
                pid = os.getpid()
                if os.fork() == 0:  # a killer that does not know the save's progress
                    time.sleep(delay)
                    with contextlib.suppress(ProcessLookupError):  # the rank may have ended by then
                        os.kill(pid, signal.SIGKILL)
                    os._exit(0)
            return try_save(place / "checkpoints", rank, "at once")

        found[f"kill -9 of rank {number % 2} after {delay * 1000:.0f} ms"] = try_out(place, act)
    return found


def limit_files(root: Path) -> dict[str, Any]:
    """Return the files when one rank's file size limit is below the size of its part."""

    def act(rank: int) -> Any:
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
        return try_save(place / "checkpoints", rank, "at once")

    place = root / "limit"
    return {"a limit on the size of files, on rank 1": try_out(place, act)}


def fill_disk(root: Path) -> dict[str, Any]:
    """Return the files when the disk is full: a small disk in memory with only this much free."""
    found = {}
    whole = ROWS * COLUMNS * 4 * NUM_TENSORS
    # The last one: two files, each with less than a page for its header, and no page for the manifest.
    for title, room in (("nothing", 0), ("half", whole // 2), ("all but the manifest", whole + 2 * 4096)):
        for how in ("at once", "in the background"):
            place = root / f"disk-{room}-{how.replace(' ', '-')}"
            folder = place / "checkpoints"
            folder.mkdir(parents=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], check=True)

            def act(rank: int, folder: Path = folder, room: int = room, how: str = how) -> Any:
                if rank == 0:
                    state = os.statvfs(folder)
                    with (folder / ".filler").open("wb") as file:
                        file.write(bytes(state.f_bavail * state.f_frsize - room))
                dist.barrier()
                return try_save(folder, rank, how)

            def free(folder: Path = folder) -> None:
                (folder / ".filler").unlink()

            found[f"a full disk with room for {title}, {how}"] = try_out(place, act, free)
            subprocess.run(["umount", str(folder)], check=True)
    return found


if __name__ == "__main__":
    target, kind = Path(sys.argv[1]), sys.argv[2]
    acts = {
        "kills": kill_at_moments,
        "times": kill_at_any_time,
        "interrupts": interrupt_at_moments,
        "limit": limit_files,
        "disk": fill_disk,
    }
    result = acts[kind](target / "trials")
    (target / "found.json").write_text(json.dumps(result))
