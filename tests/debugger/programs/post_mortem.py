"""Stops after an error that it handles. `stops` calls Tra() itself, for expressions at that prompt."""

import sys

from multiprocessing_pdb import MultiprocessingPdb, post_mortem

Tra = MultiprocessingPdb().set_trace


def stops(value):
    Tra()
    return value + 1


def divide(value):
    return value // (value - value)


try:
    divide(7)
except ZeroDivisionError:
    post_mortem()
sys.stdout.write("handled\n")
