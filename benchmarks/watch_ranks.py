"""Run a training script under one tool with one bug after another, on forked ranks. See watch_peers.py.

python benchmarks/watch_ranks.py TOOL SCRIPT FOLDER RANKS STEPS BUG...

TOOL is `plain`, `watch`, `guard` or `msprobe`; `none` as BUG is the right script. FOLDER/BUG has each
rank's output and `rankN.seconds`, the time of each optimizer step. Torch is imported once: the import takes
longer than training.
"""

from __future__ import annotations

import itertools
import json
import os
import runpy
import socket
import sys
import time
from pathlib import Path

# DDP and optimizers import the compiler on first construction, which would take most of a rank's time.
import torch._dynamo  # noqa: F401
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


def start_watch(out: Path, rank: int, world: int) -> None:
    """Record the first two steps."""
    from moeverify.scripts.record.settings import Settings
    from moeverify.scripts.record.start import start

    start(Settings(out=out / "run", first=0, last=1).model_dump_json(), str(rank), str(world))


def start_guard(out: Path, rank: int, world: int) -> None:
    """Start the guard, with the folder that `moeverify watch --guard` would read."""
    from moeverify.scripts.guard.settings import GuardSettings
    from moeverify.scripts.guard.start import start

    start(GuardSettings(out=out / "guard").model_dump_json(), str(rank), str(world))


def start_msprobe(out: Path, rank: int, world: int) -> None:
    """Start msprobe's monitor when the script makes its optimizer: it needs model and optimizer."""
    from msprobe.core.monitor_v2.trainer import TrainerMonitorV2

    folder = out / "monitor"
    (folder / f"rank_{rank}").mkdir(parents=True, exist_ok=True)  # "illegal path" where there is none
    config = folder / f"config{rank}.json"
    monitors = {"weight_grad": {"enabled": True, "ops": ["norm"]}}
    config.write_text(json.dumps({"framework": "pytorch", "output_dir": str(folder), "monitors": monitors}))
    models: list[nn.Module] = []
    make_module, make_optimizer = nn.Module.__call__, Optimizer.__init__

    def note_model(self: nn.Module, *values: object, **named: object) -> object:
        if not models:
            models.append(self)
            monitor = TrainerMonitorV2(str(config), fr="pytorch")
            monitor.start(model=self, optimizer=optimizers[0])
        return make_module(self, *values, **named)

    optimizers: list[Optimizer] = []

    def note_optimizer(self: Optimizer, *values: object, **named: object) -> None:
        make_optimizer(self, *values, **named)
        optimizers.append(self)

    nn.Module.__call__ = note_model
    Optimizer.__init__ = note_optimizer


TOOLS = {
    "plain": lambda out, rank, world: None,
    "watch": start_watch,
    "guard": start_guard,
    "msprobe": start_msprobe,
}


def run_rank(tool: str, script: str, out: Path, rank: int, world: int, port: int, words: list[str]) -> None:
    """Train as a rank that torchrun has started, and end the process."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    out.mkdir(parents=True, exist_ok=True)
    log = os.open(out / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    TOOLS[tool](out, rank, world)
    times = [time.perf_counter()]
    register_optimizer_step_post_hook(lambda *_: times.append(time.perf_counter()))
    sys.argv = [script, *words]
    code = 1
    try:
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = 0 if end.code in (None, 0) else 1
    finally:
        import atexit

        atexit._run_exitfuncs()
        steps = [after - before for before, after in itertools.pairwise(times)]
        (out / f"rank{rank}.seconds").write_text(json.dumps(steps))
        sys.stdout.flush()
        os._exit(code)  # freeing torch would take longer than the training


def find_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def main() -> None:
    """Run the ranks of each bug to their end, and exit with the number of failed ranks."""
    tool, script, folder, world, steps, *bugs = sys.argv[1:]
    num_failed = 0
    for bug in bugs:
        words = ["--steps", steps, *(["--bug", bug] if bug != "none" else [])]
        port, children = find_port(), []
        for rank in range(int(world)):
            children.append(os.fork())
            if children[-1] == 0:
                run_rank(tool, script, Path(folder) / bug, rank, int(world), port, words)
        num_failed += sum(os.waitpid(child, 0)[1] != 0 for child in children)
    raise SystemExit(num_failed)


if __name__ == "__main__":
    main()
