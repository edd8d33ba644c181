"""A stopped process forks a child that stops, optionally in a thread, and reports how the child ended."""

import os
import sys
import threading

from multiprocessing_pdb import MultiprocessingPdb

Tra = MultiprocessingPdb().set_trace


def fork():
    Tra(header="parent")
    child = os.fork()
    if child == 0:
        Tra(header="child")
        answer = 7
        os._exit(answer)
    _, status = os.waitpid(child, 0)
    sys.stdout.write(f"child {os.waitstatus_to_exitcode(status)}\n")


def main():
    if sys.argv[1] == "main":
        fork()
        return
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()


main()
