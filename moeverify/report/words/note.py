"""Notes beside a verdict: why a case did not run, its golden, declared differences, detection limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import singledispatch

from moeverify.report.numbers import format_count, format_number, format_seconds
from moeverify.results.decided import DECIDED_LIMIT
from moeverify.results.finding import MAX_CONCLUSIVE, CheckResult, Verdict
from moeverify.results.golden import GoldenRow, GoldenState
from moeverify.results.obstacle import MissingPackages, Obstacle, RankLimit, TooFewRanks, UnsupportedHere
from moeverify.results.run import Declared


@singledispatch
def describe_obstacle(obstacle: object) -> str:
    """Return why a case cannot run on this machine."""
    raise TypeError(f"no words for {type(obstacle).__name__}")


@describe_obstacle.register
def _(obstacle: TooFewRanks) -> str:
    return f"needs {obstacle.num_needed} ranks; {describe_limit(obstacle.limit)}"


@describe_obstacle.register
def _(obstacle: MissingPackages) -> str:
    missing = " and ".join(obstacle.packages)
    return f"needs {obstacle.needed_by}, and {missing} cannot be imported; `{obstacle.install}` installs it"


@describe_obstacle.register
def _(obstacle: UnsupportedHere) -> str:
    return obstacle.why


def describe_limit(limit: RankLimit) -> str:
    """Return the largest possible number of ranks, and its reason."""
    if limit.by == "gpus":
        gpus = "1 GPU" if limit.most == 1 else f"{limit.most} GPUs"
        remedy = "`moeverify run` without `--backend nccl` lets ranks share them over gloo"
        return f"this machine has {gpus}, and NCCL needs one a rank; {remedy}"
    if limit.by == "launcher":
        return f"{limit.launcher} started {limit.most} ranks"
    if limit.by == "option":
        return f"--ranks {limit.most}"
    if limit.by == "processes":
        return f"at most {limit.most} ranks on a CPU"
    free, needed = (size / 2**30 for size in (limit.free_memory, limit.memory_per_rank))
    return f"{free:.1f} GiB of memory is free, and a rank needs about {needed:.1f}"


def describe_sharing(num_ranks: int, num_gpus: int, is_external: bool) -> tuple[str, ...]:
    """Return a note if ranks share GPUs, since NCCL is not verified then; otherwise nothing."""
    if is_external or not 0 < num_gpus < num_ranks:
        return ()
    gpus = "one GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
    return (f"{num_ranks} ranks share {gpus}: collectives by gloo, so this is no verdict about NCCL",)


def describe_dependent_obstacle(saver: str, obstacle: Obstacle) -> str:
    """Return why a case cannot load: the case that saves for it cannot run."""
    return f"{saver} cannot save here: {describe_obstacle(obstacle)}"


def describe_missing_save(name: str) -> str:
    """Return why a case has nothing to load: the job of this name failed."""
    return f"nothing to load: `{name}` failed"


def describe_search(name: str, seconds: float) -> str:
    """Return the announcement of the search for a cause, of at most `seconds`."""
    return f"{name} differs: it runs again, then up to {format_seconds(seconds)} of search for the first wrong line"


def describe_change(state: GoldenState) -> str:
    """Return how the recorded golden differs from the expected one; empty if it does not."""
    if state.error:
        return state.error
    if state.status == "missing":
        return f"golden {state.path} is not recorded"
    if state.status == "changed":
        return (
            f"recipe {state.recipe} has changed: {state.path} was recorded for {state.recorded}, "
            f"this is {state.current}"
        )
    found = state.across if state.across is not None and state.across.distance > state.across.limit else None
    if found is not None:
        return (
            f"one {state.device_class} computes another golden than {state.across_path}: {found.name} is off by "
            f"{found.distance:.2g} of its norm, and two devices in float64 should agree to {found.limit:g}"
        )
    if state.status == "differs" and state.deviation is not None:
        return (
            f"one device here computes another golden than {state.path}: {state.deviation.name} is off by "
            f"{state.deviation.distance:.2g} of its norm"
        )
    return ""


def describe_golden(state: GoldenState) -> str:
    """Return how the recorded golden differs, and the command that updates it."""
    command = f"`moeverify golden {state.case_file}`"
    change = describe_change(state)
    if state.remedy:
        return f"{change}; {state.remedy}"
    if state.status == "missing":
        return f"{change}; record it with {command}"
    if state.status == "changed":
        return f"{change}; refresh it with {command}"
    if state.status == "differs" and state.across is None:
        return f"{change}; if the change is meant, refresh it with {command}"
    return change


def describe_nearness(state: GoldenState) -> str:
    """Return the distance between a GPU's golden and the recorded CPU golden; empty if not compared."""
    if state.across is None or state.across.distance > state.across.limit:
        return ""
    return f"the golden of {state.device_class} is within {state.across.distance:.1e} of {state.across_path}"


def describe_damage(state: GoldenState) -> str:
    """Return that the cached golden was damaged and recomputed; empty if it was not."""
    return f"the cached golden was made again: {state.damage}" if state.damage else ""


def describe_row(row: GoldenRow) -> str:
    """Return the details of a golden's status."""
    if row.status == "unused":
        return "no case uses it; delete it or restore its case"
    if row.state is None or row.status in ("recorded", "unchanged"):
        return ""
    return describe_change(row.state) if row.status == "refreshed" else describe_golden(row.state)


def describe_declared(declared: Declared) -> str:
    """Return whether a case differs as declared."""
    if declared.equal:
        return f"declared to differ in {', '.join(declared.equal)}, and does not"
    if declared.has_more:
        return f"differs as declared in {', '.join(declared.differ)}, and in more"
    return f"differs in {', '.join(declared.differ)}, as declared: {declared.because}"


def describe_unused_loop(verdict: Verdict, *, is_own_model: bool, step: str | None = None) -> tuple[str, ...]:
    """Return a caveat for a pass of a user's own model: parts of its own training loop were not exercised.

    `step` is the name of the user's step function, if there was one.
    """
    if verdict != "pass" or not is_own_model:
        return ()
    if step is not None:
        return (
            f"not exercised: your data loading, and the creation of optimizer and scheduler; `{step}` ran the steps. "
            "`moeverify watch` runs your whole script",
        )
    return (
        "not exercised: your own training loop (data loading, zero_grad, clip, schedule, optimizer step): "
        "moeverify's loop ran instead, with the step of your engine if it has one. `recipe.step` runs your step, "
        "`moeverify watch` your whole script",
    )


def describe_undecided(checks: Sequence[CheckResult]) -> str:
    """Return why a case is undecided, from the checks that decide too little; empty if there are none."""
    return "; ".join(map(describe_decided, checks))


def list_notes(
    checks: Sequence[CheckResult], declared: Declared | None, golden: GoldenState
) -> tuple[str, ...]:
    """Return the notes of a judged case; `checks` must already contain their words."""
    notes = [describe_declared(declared) if declared is not None else ""]
    notes += [describe_inconclusive(check, MAX_CONCLUSIVE) for check in checks]
    notes += [describe_limits(checks)]
    notes += [check.unseen for check in checks]
    notes += [describe_golden(golden) if golden.status == "missing" else "", describe_nearness(golden)]
    notes.append(describe_damage(golden))
    return tuple(note for note in notes if note)


_WIDE_LIMIT = 1e-4  # wider limits are reported: errors lost below them exceed the rounding of float32


def describe_inconclusive(check: CheckResult, most: float) -> str:
    """Return a note if a check could not conclusively verify some of its tensors, else an empty string.

    `most` is the relative bound above which a comparison is inconclusive.
    """
    if not check.inconclusive:
        return ""
    verb = "is" if check.inconclusive == 1 else "are"
    noun = format_count(check.inconclusive, f"{check.name} tensor")
    text = f"{noun} of {check.tensors} {verb} inconclusive: tolerance above {100 * most:.0f} %"
    if check.inconclusive_tensors:
        widest = max(check.inconclusive_tensors, key=lambda each: each.limit)
        text += f", up to {_percent(widest.limit)} ({widest.tensor}, step {widest.step})"
    return text


def describe_decided(check: CheckResult) -> str:
    """Return how many tensors of a check are decided, and the errors that would not have been seen."""
    counts = check.decided
    if counts is None:
        return ""
    text = (
        f"{check.name}: {counts.decided} of {counts.tensors} tensors decided at {100 * DECIDED_LIMIT:.0f} %"
    )
    if counts.decided == counts.tensors:
        return text
    which = "them" if counts.decided == 0 else "the others"
    if math.isinf(counts.limit):
        return f"{text}; no error would have been seen in {which}"
    widest = "" if math.isinf(counts.worst) else f", at most {_percent(counts.worst)}"
    return (
        f"{text}; in {which} an error below {_percent(counts.limit)} (median{widest}) may not have been seen"
    )


def describe_limits(checks: Sequence[CheckResult]) -> str:
    """Return the smallest relative errors that the checks can detect; empty if all limits are small.

    The limits of float64 cases are around 1e-10; a pass in float64 needs no note.
    """
    wide = [check for check in checks if check.limits is not None and check.limits.worst > _WIDE_LIMIT]
    if not wide:
        return ""
    parts = [
        f"{check.name} {_percent(check.limits.median)} / {_percent(check.limits.worst)}"
        for check in wide
        if check.limits is not None
    ]
    return f"smallest error of a tensor that is surely seen, median / worst: {', '.join(parts)}"


def _percent(share: float) -> str:
    return f"{format_number(100.0 * share)} %"
