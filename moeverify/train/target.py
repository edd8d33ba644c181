"""Functions that a case names as `package.module:function`: import, lookup and error messages."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any, cast

from moeverify.cases.suggest import suggest
from moeverify.errors import CaseError, Problem, read_message

_OWN_FOLDER = Path(__file__).resolve().parents[1]
_TRITON = "/triton/"
_NEEDS_GPU = "Triton kernels need a GPU; run this on one, or use torch's operators in their place"


@contextmanager
def import_path(folders: Sequence[str]) -> Iterator[None]:
    """Prepend folders to the import path while the context is open."""
    before = list(sys.path)
    sys.path[:0] = folders
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before


def resolve(target: str, path: str) -> Callable[..., Any]:
    """Return the function named by `package.module:function`, or by `package.module:Class.method`.

    Raises: CaseError for the field `path` when the module or function does not exist, when the import
    fails, or when another module of the same name was imported before.
    """
    module_name, _, name = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and _is_part_of(error.name, module_name):
            message = f"there is no module `{error.name}` for `{target}`"
            raise _failure(message, path, f"looked in {_describe_path()}") from error
        message = f"the import of `{module_name}` failed: {_describe_with_cause(error)}"
        raise _failure(message, path, _advise_import(error, module_name, name)) from error
    _check_origin(module_name, path)
    try:
        found = reduce(lambda owner, part: getattr(owner, part, None), name.split("."), cast(Any, module))
    except Exception as error:  # a lazy module imports the part now
        message = f"the import of `{name}` from `{module_name}` failed: {_describe_with_cause(error)}"
        remedy = f"`from {module_name} import {name.partition('.')[0]}` must work in a Python shell"
        raise _failure(message, path, remedy) from error
    if not callable(found):
        functions = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        kind = "no" if found is None else "no function but another value"
        message = f"`{module_name}` ({_origin(module_name)}) has {kind} `{name}`"
        raise _failure(message, path, suggest(name, functions))
    function: Callable[..., Any] = found
    return function


def describe_error(error: BaseException) -> str:
    """Return `ValueError at model.py:12 in make: text`, with the innermost location in the user's code."""
    kind = type(error).__name__
    if isinstance(error, SyntaxError):
        return f"{kind} at {error.filename}:{error.lineno}: {error.msg}"
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    place = f" at {own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""
    message = read_message(error)
    if not message and own and isinstance(error, AssertionError):
        message = own[-1].line or ""
    said = f"{kind}{place}: {message}" if message else f"{kind}{place}"
    torch = sys.modules.get("torch")
    has_gpu = torch is None or torch.cuda.is_available()
    is_kernels = any(_TRITON in frame.filename for frame in traceback.extract_tb(error.__traceback__))
    # Triton reports a machine without a GPU as a wrong number of its drivers.
    return f"{said}; {_NEEDS_GPU}" if is_kernels and not has_gpu else said


def _describe_with_cause(error: BaseException) -> str:
    """Return the description of an error, and of the first error that it was raised from."""
    first = error
    while first.__cause__ is not None:
        first = first.__cause__
    said = describe_error(error)
    return said if first is error else f"{said}; caused by {describe_error(first)}"


def _advise_import(error: BaseException, module_name: str, name: str) -> str:
    """Return the remedy of a failed import; a script that trains has often made `name` by then."""
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        return f"install the package that has `{error.name}` beside moeverify"
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") == module_name and name in frame.f_globals:
            return (
                f"line {line} runs whenever `{module_name}` is imported: put the training code below "
                f'`if __name__ == "__main__":`, or `{name}` into a module of its own'
            )
    return f"`import {module_name}` must work in a Python shell"


def _failure(message: str, path: str, remedy: str = "") -> CaseError:
    return CaseError([Problem(message, path=path, remedy=remedy)])


def _is_part_of(missing: str | None, module_name: str) -> bool:
    """Return whether the missing module is the wanted one or one of its parent packages."""
    return missing is not None and f"{module_name}.".startswith(f"{missing}.")


def is_users(filename: str) -> bool:
    """Return whether a file is the user's, and not of Python, an installed package or moeverify."""
    file = Path(filename)
    installed = {"site-packages", "dist-packages"} & set(file.parts)
    in_python = file.is_relative_to(sys.base_prefix) and f"python{sys.version_info.major}." in filename
    return not (installed or in_python or filename.startswith("<") or file.is_relative_to(_OWN_FOLDER))


def _describe_path() -> str:
    """Return the folders of the import path outside Python's own, and a mention of installed packages."""
    own = (sys.prefix, sys.base_prefix)
    folders = [entry for entry in sys.path if entry and not entry.startswith(own) and Path(entry).is_dir()]
    return ", ".join([*dict.fromkeys(folders), "the installed packages"])


def _origin(module_name: str) -> str:
    return getattr(sys.modules[module_name], "__file__", None) or "a folder without __init__.py"


def _check_origin(module_name: str, path: str) -> None:
    """Check that an earlier case has not imported another file under this name: ranks serve many cases.

    Raises: CaseError.
    """
    top = module_name.partition(".")[0]
    used = getattr(sys.modules.get(top), "__file__", None)
    spec = importlib.machinery.PathFinder.find_spec(top, sys.path)
    if used is None or spec is None or spec.origin is None:
        return
    if Path(spec.origin).resolve() == Path(used).resolve():  # two names of one folder are one package
        return
    message = f"`{top}` means {spec.origin} here, but an earlier case has imported {used} under this name"
    raise _failure(message, path, "give one of them another name, or put each into a package of its own")
