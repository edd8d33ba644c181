"""Parsing of stacks in the text formats of `traceback` and `faulthandler`. Does not import torch."""

from __future__ import annotations

import re

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<function>\S+)', re.MULTILINE)
_LIBRARY = re.compile(
    r"site-packages/|dist-packages/|/lib/python3|moeverify/(?:verification/collectives|train/calls)/|^<"
)
_RANK_ENTRY = re.compile(
    r'^\s*File "[^"]*moeverify/verification/launch/agent\.py", line \d+,? in run_entry', re.MULTILINE
)

_RUNNER = re.compile(
    r'^\s*File "[^"]*moeverify/verification/launch/runner\.py", line \d+,? in run', re.MULTILINE
)


def find_place(stack: str) -> str:
    """Return `file:line in function` of the innermost non-library frame of the thread that runs the jobs.

    Return an empty string if the text contains no frame.
    """
    if _is_innermost_first(stack):
        # `faulthandler` lists the newest thread first. If the main thread runs the jobs, it comes last.
        threads = _split_threads(stack)
        frames = list(_FRAME.finditer(next(filter(_RUNNER.search, threads), threads[-1])))
    else:
        frames = list(_FRAME.finditer(re.split(r"\n\n(?=Thread )", stack)[0]))[::-1]
    own = [frame for frame in frames if not _LIBRARY.search(frame["file"])] or frames
    return f"{own[0]['file']}:{own[0]['line']} in {own[0]['function']}" if own else ""


def trim_stack(stack: str) -> str:
    """Return the stack without the frames of the agent, which are below the own frames of a forked rank."""
    entry = _RANK_ENTRY.search(stack)
    if entry is None:
        return stack
    if _is_innermost_first(stack):
        rest = stack[entry.start() :].split("\n\n", 1)
        return "\n\n".join([stack[: entry.start()].rstrip(), *rest[1:]])
    # A frame of `traceback` is followed by its source line and markers.
    following = re.search(r'^\s*File "', stack[entry.end() :], re.MULTILINE)
    head = re.match(r".*most recent call last.*\n", stack)
    if following is None or head is None:
        return stack
    return head[0] + stack[entry.end() + following.start() :]


def _is_innermost_first(stack: str) -> bool:
    return "most recent call first" in stack


def _split_threads(stack: str) -> list[str]:
    return re.split(r"^(?=(?:Current thread|Thread) 0x)", stack, flags=re.MULTILINE)
