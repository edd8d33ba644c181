"""A program that reaches Tra() by every kind of Python call. Its result must not depend on a debugger."""

import asyncio
import contextlib
import errno
import os
import resource
import socket
import sys
import threading
import time
from pathlib import Path

from multiprocessing_pdb import MultiprocessingPdb, post_mortem
from multiprocessing_pdb.wire.runtime_directory import RuntimeDirectory

Tra = MultiprocessingPdb().set_trace
KEPT = set()  # descriptors that the test needs


def inner(value):
    doubled = value * 2
    Tra(header="inner")
    return doubled + 1


def outer(value):
    first = inner(value)
    second = inner(first)
    return first + second


def recurse(depth):
    if depth == 0:
        Tra(header="bottom")
        return 0
    return recurse(depth - 1) + depth


def generate(count):
    for number in range(count):
        Tra(header="generator")
        yield number * 3


def fail(value):
    Tra(header="before the error")
    raise ValueError(value)


class Loud:
    """An object that stops where debuggers read values: in repr and in a property."""

    def __init__(self, value):
        self.value = value

    def __repr__(self):
        Tra(header="repr")
        return f"Loud({self.value})"

    @property
    def twice(self):
        Tra(header="property")
        return self.value * 2


class Dying:
    """An object that stops when it is collected."""

    def __del__(self):
        Tra(header="del")


async def wait_and_stop(value):
    await asyncio.sleep(0)
    Tra(header=f"task {value}")
    held = value + 1
    await asyncio.sleep(0)
    return held * 2


async def gather(count):
    return await asyncio.gather(*(wait_and_stop(number) for number in range(count)))


def in_loop(count):
    """Return the result of the tasks, or nothing if a loop already runs."""
    return asyncio.run(gather(count)) if asyncio._get_running_loop() is None else None


def in_threads(count):
    results = [None] * count

    def work(at):
        results[at] = inner(at)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def loop(count):
    total = 0
    for number in range(count):
        Tra(header=f"loop {number}")
        total += inner(number)
    return total


def caught(value):
    try:
        fail(value)
    except ValueError as error:
        Tra(header="in except")
        return str(error)
    finally:
        Tra(header="finally")


def looked_at(value):
    try:
        return 1 // (value - value)
    except ZeroDivisionError:
        post_mortem()
        return value


def managed(value):
    with contextlib.suppress(ValueError):
        fail(value)
    return value


def lost_object(value):
    dying = Dying()
    del dying
    return value


def fork(value):
    """Compute in a child process, which also stops."""
    Tra(header="before the fork")
    child = os.fork()
    if child == 0:
        try:
            os._exit(inner(value))
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def execute(value):
    """Execute another program in a child process that has stopped."""
    child = os.fork()
    if child == 0:
        try:
            Tra(header="before exec")
            os.execv("/bin/sh", ["sh", "-c", f"exit {value}"])
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def list_descriptors():
    numbers = [int(path.name) for path in Path("/proc/self/fd").iterdir()]
    return [number for number in numbers if number > 2 and number not in KEPT]


def close_descriptors(value):
    """Close all descriptors, as a daemon does."""
    Tra(header="before closing")
    for descriptor in list_descriptors():
        with contextlib.suppress(OSError):
            os.close(descriptor)
    Tra(header="after closing")
    return value


def replace_descriptors(value):
    """Open other files with the numbers of all descriptors. Nobody else may close or use these."""
    Tra(header="before replacing")
    ours, theirs = socket.socketpair()
    numbers = sorted({*list_descriptors()} - {ours.fileno(), theirs.fileno()})
    for number in numbers:
        os.dup2(theirs.fileno(), number)
    Tra(header="after replacing")
    for number in numbers:
        os.write(number, b"x")
        os.close(number)
    theirs.close()
    received = ours.recv(1 << 16)
    ours.close()
    return value if received == b"x" * len(numbers) else received


def take_descriptors(value):
    """Take all descriptors that the limit allows."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 20, limits[1]))
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    Tra(header="no descriptor left")
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for descriptor in taken:
        os.close(descriptor)
    return value


def fill_disk(value):
    """Let the next sockets find no space in their directory."""
    left, listen = [1, 2], RuntimeDirectory.listen

    def refuse(directory, name):
        if left:
            raise OSError(left.pop() and errno.ENOSPC, "No space left on device")
        return listen(directory, name)

    RuntimeDirectory.listen = refuse
    Tra(header="disk full")
    doubled = value * 2
    RuntimeDirectory.listen = listen
    return doubled


def steady(count):
    """Run for a while without a Tra(): an armed process can be stopped here."""
    total = 0
    for number in range(count):
        time.sleep(0.0005)
        total += number
    return total


def spin():
    """Loop forever."""
    while True:
        time.sleep(0.001)


OPS = {
    "inner": lambda: inner(3),
    "outer": lambda: outer(2),
    "recurse": lambda: recurse(2),
    "generate": lambda: list(generate(2)),
    "comprehend": lambda: [inner(number) for number in range(2)],
    "lambda": lambda: list(map(lambda value: Tra() or value, [1, 2])),  # noqa: C417
    "loud": lambda: Loud(4).twice,
    "lost": lambda: lost_object(5),
    "gather": lambda: in_loop(2),
    "threads": lambda: in_threads(2),
    "loop": lambda: loop(2),
    "caught": lambda: caught(6),
    "looked_at": lambda: looked_at(7),
    "managed": lambda: managed(8),
    "fork": lambda: fork(9),
    "execute": lambda: execute(10),
    "close": lambda: close_descriptors(11),
    "replace": lambda: replace_descriptors(12),
    "take": lambda: take_descriptors(13),
    "fill": lambda: fill_disk(14),
    "steady": lambda: steady(20),
    "exec": lambda: exec("Tra(); x = 1"),
    "nothing": lambda: None,
}


def play(ops):
    """Return the results of the named operations, in order."""
    log = []
    loud = Loud(1)
    for name in ops:
        log.append((name, OPS[name]()))
    return log, loud.value


if __name__ == "__main__":
    sys.stdout.write(f"result {play(sys.argv[1:])}\n")
