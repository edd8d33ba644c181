"""hang.py [arm]: rank 0 stops; rank 1 hangs in a C call that holds the interpreter's lock."""

import ctypes
import os
import sys
import time

import multiprocessing_pdb


def sink():
    while True:  # a signal ends one sleep
        ctypes.PyDLL(None).sleep(600)


if "arm" in sys.argv:
    multiprocessing_pdb.arm()
    time.sleep(1.0)  # the watch writes its note
if os.environ["RANK"] == "0":
    multiprocessing_pdb.set_trace()
    sys.exit(0)
sink()
