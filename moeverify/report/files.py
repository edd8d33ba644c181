"""Writing of report files: paths are checked before a run, and files are written atomically after it."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterable
from pathlib import Path

from moeverify.errors import CaseError, Problem


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file atomically (text as UTF-8): a reader sees the old content or the new, never a part.

    Missing folders are created. A path that is not a regular file (a pipe, a device) is written in place.

    Raises: OSError when writing fails; the old content is kept.
    """
    raw = content.encode("utf-8") if isinstance(content, str) else content
    target = path.resolve()  # replacing a symbolic link itself would leave its target unchanged
    if target.exists() and not target.is_file():
        target.write_bytes(raw)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("xb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            part.chmod(target.stat().st_mode & 0o777)
        part.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def check_writable(files: Iterable[Path], *folders: Path | None) -> None:
    """Check before a run that its files and folders can be written; create missing folders.

    Raises: CaseError listing every path that cannot be written.
    """
    problems = [problem for path in files if (problem := _try_file(path)) is not None]
    wanted = [folder for folder in folders if folder is not None]
    problems += [problem for folder in wanted if (problem := _try_folder(folder, folder)) is not None]
    if problems:
        raise CaseError(problems)


def check_places(*folders: Path) -> None:
    """Check that files can be written in folders, and make none of them.

    Raises: CaseError listing every folder in which none can be written.
    """
    problems = []
    for folder in folders:
        existing = next(each for each in (folder, *folder.parents) if each.exists())
        reason = "" if existing.is_dir() else f"{existing} is no folder"
        if not reason and not os.access(existing, os.W_OK | os.X_OK):
            reason = f"you may not write to {existing}"
        if reason:
            remedy = "name a place that you may write to, or move the file away"
            problems.append(Problem(f"cannot write {folder}: {reason}", remedy=remedy))
    if problems:
        raise CaseError(problems)


def _try_file(path: Path) -> Problem | None:
    """Return the problem that prevents writing a file, without touching its content."""
    if path.is_dir():
        return Problem(f"{path} is a folder", remedy="name a file")
    if path.exists() and not path.is_file():
        return None
    return _try_folder(path.resolve().parent, path)


def _try_folder(folder: Path, wanted: Path) -> Problem | None:
    """Return the problem that prevents creating a file in a folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".moeverify-"):
            return None
    except OSError as error:
        is_file = isinstance(error, FileExistsError)
        reason = f"{error.filename} is no folder" if is_file else error.strerror or str(error)
        return Problem(f"cannot write {wanted}: {reason}", remedy="name a place that you may write to")
