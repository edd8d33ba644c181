"""An armed process that gets a second stop request while it handles a request, at a line if one is given."""

import sys
import time

import multiprocessing_pdb
from multiprocessing_pdb.rank import monitor

multiprocessing_pdb.arm()
control = monitor._ARMED.monitor._control


def stop(frame):
    control.stop("again")
    if len(sys.argv) > 1:
        control._break(frame, {"place": f"{__file__}:{sys.argv[1]}"})
    else:
        control._stop(frame, "asked to")


def main():
    control._ask_main("stop", stop)
    total = 0
    for number in range(3):
        time.sleep(0.001)
        total += number
    sys.stdout.write(f"total {total}\n")


main()
