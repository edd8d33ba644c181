"""A Tra() in a loop and one in a function that the loop calls: the documented usage, with steps over both."""

import sys

from multiprocessing_pdb import MultiprocessingPdb

Tra = MultiprocessingPdb().set_trace


def step(number):
    doubled = number * 2
    Tra(header="in step")
    return doubled + 1


def main():
    total = 0
    for number in range(3):
        Tra(header=f"loop {number}")
        total += step(number)
    sys.stdout.write(f"total {total}\n")


main()
