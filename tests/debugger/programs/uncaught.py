"""uncaught.py WHERE: an uncaught exception, raised in the given place; or breakpoint()."""
# ruff: noqa: T201  # a program of the tests: what it prints is compared

import importlib
import multiprocessing
import sys
import threading

import spawned

import multiprocessing_pdb


def fail(culprit):
    raise ValueError(f"from {culprit}")


if __name__ == "__main__":
    where = sys.argv[1]
    multiprocessing_pdb.install()
    if where == "main":
        fail("main")
    elif where == "thread":
        thread = threading.Thread(target=fail, args=("thread",))
        thread.start()
        thread.join()
    elif where in ("fork", "spawn"):
        target = spawned.fail if where == "spawn" else fail  # a spawned process installs for itself
        child = multiprocessing.get_context(where).Process(target=target, args=("child",))
        child.start()
        child.join()
        print("child's code", child.exitcode)
    elif where == "torch":
        torch_multiprocessing = importlib.import_module("torch.multiprocessing")
        torch_multiprocessing.start_processes(spawned.fail_numbered, ("child",), 1, start_method="spawn")
    elif where == "breakpoint":
        culprit = "breakpoint"
        breakpoint()
        print("went on")
    elif where == "post_mortem":
        try:
            fail("handled")
        except ValueError:
            multiprocessing_pdb.post_mortem()
        print("went on")
