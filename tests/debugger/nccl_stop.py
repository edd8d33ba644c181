"""A stop longer than the watchdog's heartbeat and longer than the process group's timeout.

    torchrun --nproc-per-node 2 tests/debugger/nccl_stop.py            (two GPUs, NCCL)
    torchrun --nproc-per-node 2 tests/debugger/nccl_stop.py --gloo     (the rehearsal on CPUs)

Rank 0 stops. Rank 1 learns of it through the watch, begins an all-reduce with its timeouts raised, and waits
in it. A driver, started by rank 0, asks the stopped rank through the console's own classes meanwhile, then
continues it. Prints PASS or FAIL, and exits with 0 or 1. `--unarmed` must FAIL: it shows that the
timeouts would have ended the run.
"""
# ruff: noqa: T201  # a script that is read by eye

import argparse
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
LIMIT, HEARTBEAT, STOP = 10, 15, 40  # seconds: the group's timeout, the watchdog's heartbeat, the stop
os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] = str(HEARTBEAT)  # read when NCCL's process group is made
os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "1"
os.environ.setdefault("MPDB_TERMINAL", "0")


def drive(job, seconds):
    """Query the stopped rank every second as a console does, and continue it when the time is over."""
    from multiprocessing_pdb.console.broadcast import ask
    from multiprocessing_pdb.console.registry import RankRegistry
    from multiprocessing_pdb.console.source import LocalSource

    registry = RankRegistry([LocalSource(lambda text: print("console:", text, flush=True))], job)
    stopped = registry.await_count(1, 60)
    assert len(stopped) == 1, f"{len(stopped)} stopped"
    begun = time.monotonic()
    while time.monotonic() - begun < seconds:
        (answer,) = ask(stopped, {"do": "evaluate", "text": "secret"}, 5)
        assert answer.frame.get("value", {}).get("text") == "41", answer
        time.sleep(1)
    (answer,) = ask(stopped, {"do": "line", "text": "continue", "command": True}, 30)
    print(f"driver: stopped for {time.monotonic() - begun:.0f} s, then {answer.frame.get('end')}", flush=True)
    registry.close()


def run(device, armed):
    """Return the sum that both ranks must see, and whether the timeouts were restored."""
    import torch
    import torch.distributed as dist

    from multiprocessing_pdb import MultiprocessingPdb
    from multiprocessing_pdb.rank.monitor import wait_until_raised
    from multiprocessing_pdb.rank.process_state import PROCESS
    from multiprocessing_pdb.wire.identity import identify

    rank = dist.get_rank()
    value = torch.full((1 << 20,), rank + 1.0, device=device)
    dist.all_reduce(torch.ones(1, device=device))  # NCCL connects here, not in the measured collective
    before = PROCESS.timeouts.shortest()
    trace = MultiprocessingPdb().set_trace
    driver = None
    secret = 41
    if rank == 0:
        command = [sys.executable, __file__, "--drive", identify().job]
        driver = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        trace(header=f"a stop of {STOP} s with a timeout of {LIMIT} s and a heartbeat of {HEARTBEAT} s")
        secret += 1
    elif armed:
        assert wait_until_raised(60), "rank 1 never learned of the stop"
    else:
        time.sleep(2)
    begun = time.monotonic()
    dist.all_reduce(value)
    total = value.sum().item() / value.numel()  # waits for the device
    waited = time.monotonic() - begun
    deadline = time.monotonic() + 20
    while PROCESS.timeouts.are_raised() and time.monotonic() < deadline:
        time.sleep(0.05)
    restored = not PROCESS.timeouts.are_raised() and PROCESS.timeouts.shortest() == before
    print(f"rank {rank}: sum {total}, waited {waited:.1f} s, limits {before} restored {restored}", flush=True)
    if driver is not None:
        assert driver.wait(60) == 0
    return total == 3.0 and restored and before == LIMIT and (rank == 0 or waited > STOP - 15)


def main():
    """Run as a rank or as the driver."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gloo", action="store_true")
    parser.add_argument("--unarmed", action="store_true")
    parser.add_argument("--drive", metavar="JOB")
    options = parser.parse_args()
    if options.drive:
        drive(options.drive, STOP)
        return 0
    import torch
    import torch.distributed as dist

    import multiprocessing_pdb

    rank = int(os.environ["RANK"])
    device = torch.device("cpu") if options.gloo else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if not options.gloo:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if options.gloo else "nccl", timeout=timedelta(seconds=120))
    dist.all_reduce(torch.ones(1, device=device))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=LIMIT))
    if not options.unarmed:
        multiprocessing_pdb.arm()
    passed = run(device, not options.unarmed)
    print(f"rank {rank}: {'PASS' if passed else 'FAIL'}", flush=True)
    dist.destroy_process_group()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
