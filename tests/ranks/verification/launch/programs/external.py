"""Runs the same jobs under an external launcher; rank 0 prints each outcome as a line of JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from moeverify.verification.launch.external import serve_external
from moeverify.verification.launch.plan import Job, JobOutcome


def tell(outcome: JobOutcome) -> None:
    sys.stdout.write(outcome.model_dump_json() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    plan = [Job.model_validate(each) for each in json.loads(sys.argv[2])]
    for outcome in serve_external(plan, Path(sys.argv[1]), "jobs"):
        tell(outcome)
