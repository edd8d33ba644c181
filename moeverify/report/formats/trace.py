"""Expert load as a trace file for `moeverify place`."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

from moeverify.report.files import write_atomically
from moeverify.results.run import RunResult


def write(run: RunResult, path: Path) -> None:
    """Write the load of the only case that has one, atomically.

    Raises: OSError if no case or several cases have one, or when writing fails.
    """
    import numpy as np

    from moeverify.tools.placement.load_trace import TraceHeader
    from moeverify.tools.placement.trace_file import TraceWriter

    found = [case for case in run.cases if case.load is not None]
    if len(found) != 1:
        names = ", ".join(case.name for case in found) or "none"
        message = (
            f"a trace is of one case, and those with experts that were seen are: {names}; choose one with -k"
        )
        raise OSError(errno.EINVAL, message)
    load = found[0].load
    assert load is not None
    header = TraceHeader(
        load.layers, load.num_experts, load.num_sources, model=found[0].recipe, top_k=load.top_k
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "load.trace"
        with TraceWriter(file, header) as writer:
            for step, copies in enumerate(load.copies):
                writer.append(step, np.asarray(copies, dtype=np.int64))
        write_atomically(path, file.read_bytes())
