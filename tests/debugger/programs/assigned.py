"""Stops where a value can be assigned at the prompt. Functions that stop can be called there."""

import sys

from multiprocessing_pdb import MultiprocessingPdb

Tra = MultiprocessingPdb().set_trace


def step(number):
    Tra(header="in step")
    return number


def main():
    value = 1
    Tra()
    total = value + 1
    sys.stdout.write(f"total {total}\n")


main()
