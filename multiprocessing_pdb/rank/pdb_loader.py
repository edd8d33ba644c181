"""Import of pdbpp or pdb, without readline and without their shared instances."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

VARIABLE = "MPDB_PDB"
_PLAIN = "_multiprocessing_pdb_plain"
_MISSING = object()

# Modules of the debugger itself, which steps skip. `threading` starts and ends every thread.
_OWN_MODULES = frozenset({"bdb", "cmd", "pdb", "pdbpp", "code", "codeop", "threading", _PLAIN})

_OWN_FOLDER = str(Path(__file__).resolve().parent.parent) + os.sep


def is_own_module(name: object) -> bool:
    """Return whether a module belongs to the debugger."""
    return name in _OWN_MODULES or (isinstance(name, str) and name.startswith("multiprocessing_pdb."))


def is_own_file(path: str) -> bool:
    """Return whether a file is a module of the debugger."""
    loaded = (getattr(sys.modules.get(name), "__file__", None) for name in _OWN_MODULES)
    return path.startswith(_OWN_FOLDER) or path in loaded


@contextmanager
def without_readline() -> Iterator[None]:
    """Make `import readline` fail inside the block: it can deadlock in the background (pytorch #171818)."""
    known = sys.modules.get("readline", _MISSING)
    if known is _MISSING:
        sys.modules["readline"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if known is _MISSING and sys.modules.get("readline", _MISSING) is None:
            del sys.modules["readline"]


def _load_plain() -> ModuleType:
    """Return the pdb of the standard library, even if pdbpp has replaced it."""
    path = Path(sysconfig.get_path("stdlib")) / "pdb.py"
    spec = importlib.util.spec_from_file_location(_PLAIN, path)
    if spec is None or spec.loader is None:
        import pdb

        return pdb
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def load_pdb() -> ModuleType:
    """Return pdbpp if it can be imported, else pdb. MPDB_PDB=pdb selects pdb."""
    with without_readline():
        if os.environ.get(VARIABLE) == "pdb":
            return sys.modules.get(_PLAIN) or _load_plain()
        try:
            import pdbpp
        except Exception:  # a pdbpp that does not fit this Python must not prevent the stop
            return _load_plain()
        # pdbpp sets these in the importing thread only, but reads them in every thread.
        for name, value in (("GLOBAL_PDB", None), ("_pdbpp_completing", False), ("_pdbpp_in_init", False)):
            if not hasattr(pdbpp.local, name):
                setattr(pdbpp.local, name, value)
        return pdbpp  # type: ignore[no-any-return]
