"""A program that never calls Tra(). The console stops it when armed; its result does not depend on that."""

import sys
import time
from pathlib import Path

from multiprocessing_pdb import arm

arm()
TOTAL = []


def step(number):
    loss = number * 0.5
    TOTAL.append(loss)
    time.sleep(0.01)
    return loss


def main(path):
    number = 0
    while not Path(path).exists():
        step(number)
        number += 1
    assert [loss * 2 for loss in TOTAL] == list(range(number))
    sys.stdout.write("steps agree\n")


main(sys.argv[1])
