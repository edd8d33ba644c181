"""Weight gradients of experts: one product and one sum per micro-batch, or for several together.

python benchmarks/joined_gradients.py [--joined 2 4 8]
python benchmarks/joined_gradients.py --rehearse     # tiny, on a CPU

One matrix of four experts of Mixtral 8x7B in bfloat16, with few rows for each in a micro-batch.
"""

import argparse
import time

import torch
from output import print_setting, print_table

from moeverify.parallel.joined_gradients import GradientOperands, sum_gradients

NUM_EXPERTS = 4


def make_passes(num_passes, num_rows, sizes, device):
    """Return the rows of micro-batches, half of which belong to no expert."""
    each = num_rows // 2 // NUM_EXPERTS
    ends = torch.arange(1, NUM_EXPERTS + 1, device=device, dtype=torch.int32) * each
    hidden, width = sizes

    def draw(size):
        return torch.randn(num_rows, size, device=device).to(torch.bfloat16)

    return [GradientOperands(draw(hidden), draw(width), ends) for _ in range(num_passes)]


def time_each(function, device, repeats=10):
    """Return the mean milliseconds of a call after a warm-up."""
    for number in range(repeats + 3):
        if number == 3:
            synchronize(device)
            start = time.perf_counter()
        function()
    synchronize(device)
    return 1e3 * (time.perf_counter() - start) / repeats


def synchronize(device):
    """Wait for a GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def main():
    """Measure both ways."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--joined", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rows", type=int, default=2048, help="rows of a micro-batch's buffer")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on a CPU")
    options = parser.parse_args()
    print_setting()
    device, sizes = ("cpu", (32, 64)) if options.rehearse else ("cuda", (4096, 14336))
    total = torch.zeros(NUM_EXPERTS, sizes[1], sizes[0], device=device, dtype=torch.bfloat16)
    rows = []
    for joined in options.joined:
        passes = make_passes(joined, options.rows, sizes, device)

        def add_each(passes=passes):
            for each in passes:
                total.add_(sum_gradients([each]))

        def add_joined(passes=passes):
            total.add_(sum_gradients(passes))

        times = (time_each(add, device) / joined for add in (add_each, add_joined))
        rows.append((joined, *(f"{spent:.3f}" for spent in times)))
    print_table(("joined", "each, ms", "together, ms"), rows, "A micro-batch, product and sum:")


if __name__ == "__main__":
    main()
