"""Errors of the operating system that are no bugs of moeverify, such as a full disk or missing rights."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

_NO_SPACE = "free some space, or name another place"
_NO_RIGHT = "name a place that you may use"
_REFUSALS = {
    errno.ENOSPC: _NO_SPACE,
    errno.EDQUOT: _NO_SPACE,
    errno.EFBIG: _NO_SPACE,
    errno.EROFS: _NO_RIGHT,
    errno.EACCES: _NO_RIGHT,
    errno.EPERM: _NO_RIGHT,
    errno.ENOTDIR: _NO_RIGHT,
    errno.EISDIR: _NO_RIGHT,
    errno.ELOOP: "the links lead in a circle: mend them",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ENOENT: "it may have been deleted while this ran",
    errno.EEXIST: "something else has made it meanwhile: try again",
    errno.EIO: "the disk or the network file system fails: look at the kernel's log",
    errno.ESTALE: "the network file system has lost it: try again",
    errno.EMFILE: "raise `ulimit -n`",
    errno.ENFILE: "this machine has too many files open: try again later",
    errno.ENOMEM: "free some memory, or use fewer ranks",
    errno.EAGAIN: "raise `ulimit -u`, or end other processes",
}


_OF_INPUTS = (errno.EACCES, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EPERM)
_NO_MEMORY = re.compile("cannot allocate memory|can't allocate memory|failed to map segment", re.IGNORECASE)


def is_bad_input(error: OSError) -> bool:
    """Return whether the user named a path that cannot be used, as opposed to a failure of the machine."""
    return error.errno in _OF_INPUTS


def lacks_memory(error: Exception) -> bool:
    """Return whether an error of Python, torch or the loader of libraries means that memory is exhausted."""
    return isinstance(error, MemoryError) or bool(_NO_MEMORY.search(str(error)))


def describe_refusal(error: OSError) -> str:
    """Return the error and its remedy; empty if it may be a bug of moeverify."""
    if error.errno is None or error.errno not in _REFUSALS:
        return ""
    if not _has_current_folder():
        return "the current folder was deleted; go to one that is there"
    reason = error.strerror or os.strerror(error.errno)
    place = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
    return f"{place}{reason}; {_REFUSALS[error.errno]}"


def _has_current_folder() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return False
    return True
