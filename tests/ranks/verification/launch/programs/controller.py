"""A program that runs one endless job and reports its progress on standard output."""

from __future__ import annotations

import sys
from pathlib import Path

from moeverify.verification.launch.launcher import run_jobs
from moeverify.verification.launch.plan import Job, LaunchEvent

PROGRAMS = Path(__file__).parent


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def tell(event: LaunchEvent) -> None:
    say(event.kind)


if __name__ == "__main__":
    jobs = [Job(name="endless", num_ranks=2, timeout=300.0, payload={"do": "sleep"})]
    try:
        for _ in run_jobs(jobs, entry=str(PROGRAMS / "jobs.py"), folder=Path(sys.argv[1]), on_event=tell):
            pass
    except KeyboardInterrupt:
        say("interrupted")
