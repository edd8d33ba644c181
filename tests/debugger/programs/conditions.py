"""Every condition of Tra() in one run. The console checks which calls stopped."""

from multiprocessing_pdb import MultiprocessingPdb

Tra = MultiprocessingPdb().set_trace


def run():
    for turn in range(7):
        Tra(ranks=[1], header=f"ranks {turn}")
        Tra(when=turn == 3, header=f"when {turn}")
        Tra(when=lambda: turn == 4, header=f"callable {turn}")  # noqa: B023
        Tra(skip=5, header=f"skip {turn}")
        Tra(every=3, header=f"every {turn}")
        Tra(once=True, header=f"once {turn}")


run()
