"""A loop that changes values, one of which goes bad."""

import sys

from multiprocessing_pdb import MultiprocessingPdb

Tra = MultiprocessingPdb().set_trace


def train():
    total = 0.0
    Tra()
    state = {"a": [1]}
    for number in range(100):
        total += number
        if number == 30:
            state["a"].append(2)
        if number == 60:
            total = float("nan")
    sys.stdout.write(f"total {total}\n")


train()
