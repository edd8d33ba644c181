"""Sentences about the results of `moeverify doctor`, and their consequences for verification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moeverify.report.words.note import describe_limit
from moeverify.results.obstacle import RankLimit
from moeverify.results.probe import Answer, Probe, ProbeOutcome, ProbeRow, Status

_ENOUGH_RANKS = 8
_MOST_CHARACTERS = 160
_OWN = "moeverify's own collectives check for contiguity; "
_NO_MEGABLOCKS = (
    "cases with experts: megablocks are skipped; "
    "pip install --no-deps --no-build-isolation stanford-stk==0.7.1 megablocks==0.10.0"
)
_NO_TRITON = "megablocks needs it, and so does the comparison beside a training on GPUs"


@dataclass(frozen=True)
class _Words:
    """A table row without its name; `value` may contain the placeholders found, wrong and error."""

    value: str
    meaning: str = ""
    status: Status = "ok"


_REFUSED_STRIDES = _Words("refused: {error}", "a strided tensor is an error, never a wrong number")
_REFUSED_LAYOUTS = _Words("refused: {error}", "a permuted gradient is an error, never a wrong number")
_RIGHT = _Words("right")

_PROBES: Mapping[Probe, Mapping[ProbeOutcome, _Words]] = {
    Probe.SUMS: {
        ProbeOutcome.RIGHT: _Words("all_reduce right in {found}", "the layouts stand on it"),
        ProbeOutcome.WRONG: _Words("all_reduce: {wrong}", "no verdict can be trusted here", "fail"),
    },
    Probe.AVERAGE: {
        ProbeOutcome.RIGHT: _Words("right", "FSDP1 and FSDP2 average with it"),
        ProbeOutcome.SUM: _Words(
            "returns the sum",
            "every fsdp layout differs from its golden, and it is not the layout's fault (pytorch #162338)",
            "fail",
        ),
        ProbeOutcome.WRONG: _Words(
            "wrong", "every fsdp layout differs from its golden, and it is not the layout's fault", "fail"
        ),
        ProbeOutcome.REFUSED: _Words("{error}", "no fsdp layout can run here", "fail"),
    },
    Probe.ALL_TO_ALL: {
        ProbeOutcome.RIGHT: _Words("right in {found}", "tokens of expert parallelism travel by it"),
        ProbeOutcome.WRONG: _Words("{wrong}", "layouts with ep cannot be verified here", "fail"),
    },
    Probe.STRIDED: {
        ProbeOutcome.RIGHT: _RIGHT,
        ProbeOutcome.REFUSED: _REFUSED_STRIDES,
        ProbeOutcome.WRONG: _Words(
            "sums other elements than the view's",
            f"{_OWN}a user's code that reduces a strided tensor gets wrong numbers (pytorch #192920)",
            "warn",
        ),
    },
    Probe.LAYOUTS: {
        ProbeOutcome.RIGHT: _RIGHT,
        ProbeOutcome.REFUSED: _REFUSED_LAYOUTS,
        ProbeOutcome.WRONG: _Words(
            "sums in the order of memory",
            f"{_OWN}a user's hook that reduces gradients as they come may add wrong elements",
            "warn",
        ),
    },
    Probe.SCATTER_LAYOUTS: {
        ProbeOutcome.RIGHT: _RIGHT,
        ProbeOutcome.REFUSED: _REFUSED_LAYOUTS,
        ProbeOutcome.WRONG: _Words(
            "scatters in the order of memory",
            f"{_OWN}a user's code that reduces gradients as they come gets elements in another order",
            "warn",
        ),
    },
    Probe.GATHER_BACKWARD: {
        ProbeOutcome.RIGHT: _RIGHT,
        ProbeOutcome.REFUSED: _Words("{error}", "moeverify does not use it", "warn"),
        ProbeOutcome.WRONG: _Words(
            "gradient wrong",
            "moeverify does not use it; "
            "a user's torch.distributed.nn.functional.all_gather gives a wrong gradient",
            "warn",
        ),
    },
    Probe.PREMULTIPLIED: {
        ProbeOutcome.RIGHT: _Words("right", "FSDP2's set_gradient_divide_factor uses it"),
        ProbeOutcome.REFUSED: _Words(
            "not supported",
            "FSDP2's set_gradient_divide_factor needs set_force_sum_reduction_for_comms(True), as moeverify does",
            "warn",
        ),
        ProbeOutcome.WRONG: _Words(
            "wrong",
            "FSDP2's set_gradient_divide_factor needs set_force_sum_reduction_for_comms(True), as moeverify does",
            "warn",
        ),
    },
    Probe.DIVIDE_FACTOR: {
        ProbeOutcome.RIGHT: _Words("a factor of 2 divides by 2"),
        ProbeOutcome.WRONG: _Words(
            "a factor of 2 divides {wrong}",
            "moeverify divides by itself there; a user's set_gradient_divide_factor over one rank is wrong",
            "warn",
        ),
    },
    Probe.GROUPED_MM: {
        ProbeOutcome.RIGHT: _Words("right in {found}", "other dtypes run the experts in a loop"),
        ProbeOutcome.WRONG: _Words(
            "wrong in {wrong}", "cases with experts: grouped_mm differ from their golden", "fail"
        ),
        ProbeOutcome.REFUSED: _Words(
            "fails in every dtype", "cases with experts: grouped_mm cannot run", "warn"
        ),
        ProbeOutcome.ABSENT: _Words("not in this torch", "cases with experts: grouped_mm cannot run", "warn"),
    },
    Probe.FUSED_SGD: {
        ProbeOutcome.RIGHT: _RIGHT,
        ProbeOutcome.WRONG: _Words("wrong", "updates of `optimizer: fused` differ", "fail"),
        ProbeOutcome.REFUSED: _Words(
            "not implemented", "write `optimizer: foreach` in layouts with fsdp2, tp or ep", "warn"
        ),
    },
    Probe.TRITON: {
        ProbeOutcome.RIGHT: _Words("{found}"),
        ProbeOutcome.ABSENT: _Words("not installed", _NO_TRITON),
        ProbeOutcome.BROKEN: _Words("installed, and its import fails: {error}", _NO_TRITON, "warn"),
    },
    Probe.MEGABLOCKS: {
        ProbeOutcome.RIGHT: _Words("{found}", "cases with experts: megablocks run"),
        ProbeOutcome.ABSENT: _Words("not installed", _NO_MEGABLOCKS),
        ProbeOutcome.BROKEN: _Words("installed, and its import fails: {error}", _NO_MEGABLOCKS, "warn"),
    },
    Probe.GPU: {
        ProbeOutcome.RIGHT: _Words("{found}"),
        ProbeOutcome.SLOW: _Words("{found}", "torch's grouped matmul has no fast path below capability 9.0"),
    },
    Probe.PEER_ACCESS: {
        ProbeOutcome.RIGHT: _Words("GPU 0 and GPU 1 reach each other"),
        ProbeOutcome.ABSENT: _Words("no", "NCCL goes through the host: slower, the same numbers", "warn"),
    },
    Probe.NCCL: {
        ProbeOutcome.RIGHT: _Words("{found}"),
        ProbeOutcome.ABSENT: _Words("not in this torch", "layouts cannot run on CUDA", "fail"),
    },
}
# Any probe may crash or hang its ranks.
_ENDS = {
    ProbeOutcome.HUNG: _Words("hangs: {error}", "a case that does the same will end so too", "fail"),
    ProbeOutcome.CRASHED: _Words("crashes: {error}", "a case that does the same will end so too", "fail"),
    ProbeOutcome.UNSTARTED: _Words("no ranks came up: {error}", "no case can run here", "fail"),
}


def word_answer(name: str, probe: Probe | None, answer: Answer) -> ProbeRow:
    """Return the row of a probe; a probe without words of its own can only crash or hang."""
    words = _ENDS.get(answer.outcome) or (_PROBES[probe][answer.outcome] if probe is not None else None)
    assert words is not None
    value = words.value.format(
        found=", ".join(answer.found), wrong=", ".join(answer.wrong), error=_shorten(answer.error)
    )
    return ProbeRow(name=name, value=value, meaning=words.meaning, status=words.status)


def word_host(environment: Mapping[str, str], cores: int, limit: RankLimit) -> list[ProbeRow]:
    """Return rows about this machine that need no rank."""
    torch = environment["torch"]
    if torch == "not installed":
        meaning, status = "nothing can run; pip install 'torch>=2.11'", "fail"
    else:
        meaning, status = "goldens are made anew for each version of torch", "ok"
    slow = "more ranks than cores take turns: slow, but right"
    few = f"{describe_limit(limit)}; cases that need more are skipped"
    return [
        ProbeRow(name="moeverify", value=environment["moeverify"], meaning=""),
        ProbeRow(name="python", value=environment["python"], meaning=""),
        ProbeRow.model_validate({"name": "torch", "value": torch, "meaning": meaning, "status": status}),
        ProbeRow(name="platform", value=environment["platform"], meaning=""),
        ProbeRow(name="cores", value=str(cores), meaning=slow, status="ok" if cores > 1 else "warn"),
        ProbeRow(
            name="ranks on the CPU",
            value=str(limit.most),
            meaning=few,
            status="ok" if limit.most >= _ENOUGH_RANKS else "warn",
        ),
    ]


def word_gpus(count: int) -> ProbeRow:
    """Return the row for the number of GPUs."""
    if count == 0:
        meaning = "cases run on the CPU with gloo: no verdict here is about NCCL or CUDA kernels"
        return ProbeRow(name="GPUs", value="none", meaning=meaning, status="warn")
    if count == 1:
        meaning = "NCCL needs one a rank: here ranks share it, and gloo carries their collectives"
        return ProbeRow(name="GPUs", value="1", meaning=meaning, status="warn")
    meaning = f"cases of up to {count} ranks run on CUDA with NCCL, larger ones share GPUs over gloo"
    return ProbeRow(name="GPUs", value=str(count), meaning=meaning)


def word_obstacle(name: str, error: Exception) -> ProbeRow:
    """Return the row for a probe whose ranks could not be started."""
    meaning = "cases will not start either"
    return ProbeRow(name=name, value=f"could not be probed: {error}", meaning=meaning, status="fail")


def _shorten(text: str) -> str:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= _MOST_CHARACTERS else f"{line[: _MOST_CHARACTERS - 3]}..."
