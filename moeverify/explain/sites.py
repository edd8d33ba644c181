"""Lines of user code that call an operator, even if the call is deep inside torch."""

from __future__ import annotations

import ast
import functools
import linecache
import sys
import sysconfig
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType

import torch

from moeverify.explain.program import Site
from moeverify.train.calls.listener import DECORATORS

MOST_SITES = 6
"""Maximum number of calling lines that are kept for each operator."""

_PACKAGE = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_WATCHERS = tuple(
    str(Path(__file__).parents[1] / name)
    for name in (
        "explain",
        "parallel/regions",
        "train/calls",
        "verification",
    )
)
_COLLECTIVES = tuple(
    f"{_TORCH}/{name}"
    for name in (
        "_compile.py",
        "_dynamo/",
        "_ops.py",
        "overrides.py",
        "distributed/c10d_logger.py",
        "distributed/distributed_c10d.py",
        "utils/_contextlib.py",
    )
)
_HOOKS = f"{_TORCH}/distributed/fsdp/"
"""Code of torch that runs operators of its own in a backward pass."""

_ENGINE = "_engine_run_backward"
"""The torch function that runs autograd: outer frames have called `backward`."""

_IS_INNER: dict[CodeType, bool] = {}
_SITES: dict[tuple[CodeType, int], Site] = {}


def find_sites(skip: int = 2) -> tuple[Site, ...]:
    """Return the lines of user code that made the current call, the innermost first.

    For operators that autograd runs, the line of FSDP that calls them from a hook, if there is one: the caller of
    `backward` did not choose them, and they are no derivatives.
    """
    return _list_sites(sys._getframe(skip))


def _list_sites(frame: FrameType | None) -> tuple[Site, ...]:
    found: list[Site] = []
    hook: FrameType | None = None
    while frame is not None and len(found) < MOST_SITES:
        code = frame.f_code
        if not found and code.co_name == _ENGINE:
            return () if hook is None else (_find_site(hook),)
        if not _is_inner(code):
            found.append(_find_site(frame))
        elif hook is None and code.co_filename.startswith(_HOOKS):
            hook = frame
        frame = frame.f_back
    return tuple(found)


def _find_site(frame: FrameType) -> Site:
    key = (frame.f_code, frame.f_lasti)
    site = _SITES.get(key)
    if site is None:
        site = _SITES[key] = _make_site(frame.f_code, frame.f_lineno, frame.f_lasti)
    return site


def is_in_function() -> bool:
    """Return whether an autograd function runs, whose `backward` passes the gradients of its calls."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not torch.autograd.Function.apply.__code__:
        frame = frame.f_back
    return frame is not None


def parse_file(path: str) -> ast.Module:
    """Return the syntax tree of a source file; an empty one if it has none."""
    return _parse("".join(linecache.getlines(path)))


@functools.lru_cache(maxsize=64)
def _parse(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def find_line(file: str, line: int) -> Site:
    """Return a whole line of code as a site."""
    text = linecache.getline(file, line).rstrip().encode()
    return Site(file, line, "", 0, (line, len(text) - len(text.lstrip()), line, len(text)))


def is_direct(skip: int = 2) -> bool:
    """Return whether code outside torch called the current collective."""
    frame: FrameType | None = sys._getframe(skip)
    while frame is not None:
        code = frame.f_code
        if not (code.co_filename.startswith(_COLLECTIVES) or _is_watcher(code)):
            return not code.co_filename.startswith(_TORCH)
        frame = frame.f_back
    return False


def _make_site(code: CodeType, line: int, offset: int) -> Site:
    first, last, begin, end = next(islice(code.co_positions(), offset // 2, None), (None,) * 4)
    # Without column information (python -X no_debug_ranges) the expression is unknown.
    span = None if None in (first, last, begin, end) else (first, begin, last, end)
    return Site(code.co_filename, line, code.co_name, offset, span)  # type: ignore[arg-type]


def _is_inner(code: CodeType) -> bool:
    """Return whether a function belongs to torch or to the recording."""
    known = _IS_INNER.get(code)
    if known is None:
        known = _IS_INNER[code] = _is_watcher(code) or code.co_filename.startswith(_TORCH)
    return known


def _is_watcher(code: CodeType) -> bool:
    is_mode = code.co_name in ("__torch_function__", "__torch_dispatch__")
    file = code.co_filename
    return is_mode or file.startswith((*_WATCHERS, "<")) or file.endswith(DECORATORS)


def is_of_hook(sites: Sequence[Site]) -> bool:
    """Return whether torch's own code runs an operator in a hook, given the lines of the operator."""
    return bool(sites) and sites[0].file.startswith(_HOOKS)


def is_own(site: Site) -> bool:
    """Return whether a line belongs to this package, which calls the user's code."""
    return site.file.startswith(_PACKAGE)


@functools.cache
def is_of_user(file: str) -> bool:
    """Return whether a file belongs neither to this package nor to a library."""
    return not file.startswith(("<", _PACKAGE, *_LIBRARIES))
