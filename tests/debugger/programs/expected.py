"""expected.py [SECONDS]: two shards of one tensor on four ranks; the program knows the expected values."""

import os
import sys
import time
from dataclasses import replace

import multiprocessing_pdb
from multiprocessing_pdb import MultiprocessingPdb
from multiprocessing_pdb.rank.reference import ReferenceRow

Tra = MultiprocessingPdb().set_trace
RANK = int(os.environ["RANK"])
SHARD = ReferenceRow("weight w", f"shard {RANK // 2}", 0.0, norm=5.0, bound=0.1)
OTHER = replace(SHARD, name="gradient w", region="whole")
FOUND = {"squared_error": 25.0, "index": (1, 2), "expected": 3.0, "actual": 8.0}
WRONG = replace(SHARD, name="wrong w", **(FOUND if RANK == 3 else {}))


class Expected:
    """Holder of three values: a right one, one that is wrong on a single replica, and one with a NaN."""

    note = ""

    def compare(self, value, check):
        """Return the comparison rows of a value, as a program with a golden would."""
        self.note = "the optimizer's state is left out" if value is None else ""
        if value is None:
            return [OTHER, SHARD, WRONG]
        if value == "slow":
            for _ in range(int(1000 * float(sys.argv[1]))):
                time.sleep(0.001)
                check()
        elif value == "near":  # each shard is within the bound of the whole, both together are not
            return [replace(SHARD, squared_error=0.16, index=(3, RANK // 2), expected=1.0, actual=1.4)]
        elif value == "wrong":
            return [WRONG]
        elif value == "nan":
            return [replace(SHARD, squared_error=float("inf"), actual=float("nan"), index=(0,))]
        elif value != "right":
            raise LookupError(f"nothing is expected of {value}")
        return [SHARD]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        multiprocessing_pdb.set_reference(Expected())
    Tra()
    sys.stdout.write("done\n")
