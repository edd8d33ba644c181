"""Import of the installed megablocks package, with replacements for extensions that are not compiled.

Installed `megablocks_ops` and `grouped_gemm` are used; otherwise `ops.py` and `grouped_gemm.py` of this
package take their names. Without a GPU the package's Triton kernels run in Triton's interpreter, which must
be enabled before Triton is imported: `moeverify.verification.launch` sets TRITON_INTERPRET=1 for ranks on a CPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from types import ModuleType
from typing import Any

import torch

from moeverify.errors import CaseError, Problem
from moeverify.model.megablocks import grouped_gemm, ops
from moeverify.model.megablocks.requirements import NEEDED

STAND_INS = {"megablocks_ops": ops, "grouped_gemm": grouped_gemm}
_PATH = "layout.experts"


def import_package(dtype: torch.dtype) -> None:
    """Import megablocks and prepare its kernels for this machine and dtype.

    Raises: CaseError when a package is missing, or cannot compute in this dtype on this machine.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        message = f"the experts are megablocks', and {', '.join(missing)} cannot be imported"
        raise CaseError([Problem(message, path=_PATH, remedy="install them as docs/megablocks.md says")])
    for name, module in STAND_INS.items():
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            sys.modules[name] = module
    with warnings.catch_warnings():
        # megablocks/layers/gelu.py uses torch.jit.script, which is deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        kernels = importlib.import_module("megablocks.backend.kernels")
        importlib.import_module("megablocks.layers.dmoe")
    interpreted = is_interpreted(kernels)
    if not interpreted and not torch.cuda.is_available():
        message = "without a GPU megablocks' kernels need Triton's interpreter, and it is off"
        remedy = "set TRITON_INTERPRET=1 before Triton is imported"
        raise CaseError([Problem(message, path=_PATH, remedy=remedy)])
    if interpreted:
        _take_first_configurations(kernels)
    elif dtype is torch.float64:
        message = "megablocks' compiled kernels copy rows in float32"
        raise CaseError([Problem(message, path="recipe.precision", remedy="choose float32 or bfloat16")])
    _set_width(kernels, dtype)


def is_interpreted(kernels: ModuleType) -> bool:
    """Return whether Triton's interpreter runs the package's kernels."""
    return type(kernels._padded_copy.fn).__name__ == "InterpretedFunction"


def _take_first_configurations(kernels: ModuleType) -> None:
    """Keep one configuration per kernel: choosing among several measures them, which needs a driver."""
    for kernel in vars(kernels).values():
        if type(kernel).__name__ == "Autotuner":
            kernel.configs = kernel.configs[:1]


def _set_width(kernels: ModuleType, dtype: torch.dtype) -> None:
    """Make interpreted kernels compute in float64 for float64 models; they are written for float32.

    float32 in the kernels is all that keeps the package from float64. In float64 a wrong factor or a lost
    row exceeds rounding errors by ten orders of magnitude.
    """
    import triton.language

    names = vars(kernels)
    names["exact_tl"] = triton.language  # the interpreter looks for the real module in a kernel's globals
    names["tl"] = _WideLanguage() if dtype is torch.float64 else triton.language


class _WideLanguage(ModuleType):
    """`triton.language` with float64 in place of float32."""

    def __init__(self) -> None:
        super().__init__("triton.language")

    def __getattr__(self, name: str) -> Any:
        language = importlib.import_module("triton.language")
        return language.float64 if name == "float32" else getattr(language, name)
