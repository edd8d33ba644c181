"""The tasks of tasks.py in Monarch actors; its debugger sees only actors: `python monarch_tasks.py TASK`."""

import sys

import torch.distributed as dist
from monarch.actor import Actor, current_rank, endpoint, this_host
from tasks import train

WORLD = 4


class Trainer(Actor):
    """An actor for one rank."""

    @endpoint
    def train(self, task: str) -> int:
        """Train, and stop where the task requires it."""
        rank = current_rank().rank
        store = dist.TCPStore("127.0.0.1", 29544, WORLD, rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
        train(task, breakpoint, rank)
        dist.destroy_process_group()
        return rank


if __name__ == "__main__":
    trainers = this_host().spawn_procs(per_host={"ranks": WORLD}).spawn("trainer", Trainer)
    done = trainers.train.call(sys.argv[1])
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    done.get()
    sys.stdout.write("done\n")
