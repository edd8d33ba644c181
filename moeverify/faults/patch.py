"""Patches: wrappers around functions of the code under test, for the duration of a block."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType, TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
Original = Callable[..., R]
"""Type of a wrapper's first argument: `original: Original[Tensor]`."""

Holder = ModuleType | type

_FUNCTIONS = frozenset({FunctionType, BuiltinFunctionType})

# Modules that judge a run keep the originals: a fault breaks the code under test, never the comparison.
_JUDGES = (
    "moeverify.verification.checks.",
    "moeverify.verification.compare.",
    "moeverify.explain.fitting.",
    "moeverify.verification.golden.",
)

# Attributes of a stand-in: the original function, and the patch that installed it.
_ROOT, _OWNER = "_patched_function", "_patched_by"


class Patch:
    """Wraps and replaces functions and methods, and restores the originals when its block ends.

    Originals are also restored after errors. A function is replaced under every name in every loaded
    module, a method in its class. There are two exceptions. Modules that compare and diagnose keep the
    original, and so does the module of the wrapper, which may call it. With `used_by`, only that module
    sees the replacement. This distinguishes the call sites of a collective. It also wraps a torch function
    only for moeverify's calls of it.

    Wrappers compose: the last one runs first, and its `original` is the previous one. Patches of inner blocks
    wrap patches of outer blocks.

    Example: drop the sum over tp of the gradients of norms::

        def inject(patch: Patch) -> None:
            from moeverify.parallel.tensor import partial_parameters

            @patch.wrap(partial_parameters)
            def forget_norms(
                original: Original[list[Tensor]], model: Transformer, *, sequence_parallel: bool
            ) -> list[Tensor]:
                return original(model, sequence_parallel=False)
    """

    def __init__(self) -> None:
        self.functions: list[Callable[..., Any]] = []
        self._holders: list[Holder] = []
        self._loaded: list[ModuleType] = []
        self._is_open = False

    def __enter__(self) -> Patch:
        self._is_open = True
        self._loaded = list(_list_modules())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self._is_open = False
        # A module imported within the block may hold stand-ins, too.
        loaded = set(map(id, self._loaded))
        imported = [module for module in _list_modules() if id(module) not in loaded]
        for holder, name, value in _list_functions(dict.fromkeys([*imported, *self._holders])):
            before = value
            while _attribute(before, _OWNER) is self:
                before = before.__wrapped__
            if before is not value:
                setattr(holder, name, before)

    def wrap(
        self, function: Callable[P, R], *, used_by: ModuleType | None = None
    ) -> Callable[[Callable[Concatenate[Callable[P, R], P], R]], Callable[Concatenate[Callable[P, R], P], R]]:
        """Return a decorator that installs a wrapper around `function`. The original is its first argument.

        Raises: LookupError when no module, or not `used_by`, has the function; TypeError when the wrapper
        does not accept its arguments, or `function` is a class; RuntimeError outside of the block.
        """

        def decorate(
            wrapper: Callable[Concatenate[Callable[P, R], P], R],
        ) -> Callable[Concatenate[Callable[P, R], P], R]:
            self._put(function, wrapper, wrapper, used_by)
            return wrapper

        return decorate

    def replace(
        self, function: Callable[P, R], *, used_by: ModuleType | None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Return a decorator like `wrap`, for a replacement that does not get the original.

        Raises: the same errors as `wrap`.
        """

        def decorate(replacement: Callable[P, R]) -> Callable[P, R]:
            self._put(function, replacement, lambda _, *args, **named: replacement(*args, **named), used_by)
            return replacement

        return decorate

    def _put(
        self,
        function: Callable[..., Any],
        written: Callable[..., Any],
        call: Callable[..., Any],
        used_by: ModuleType | None,
    ) -> None:
        """Install stand-ins for `function`, which run `call`. `written` is the function of the fault."""
        if not self._is_open:
            raise RuntimeError("a patch wraps functions within its `with` block only")
        if isinstance(function, type):
            raise TypeError(f"`{function.__qualname__}` is a class: wrap its `__init__`")
        root = _attribute(function, _ROOT) or function
        _check_arguments(root, written, given=1 if call is written else 0)
        holders = _find_holders(root, written) if used_by is None else [used_by]
        places = [
            (holder, name, value)
            for holder, name, value in _list_functions(holders)
            if value is root or _attribute(value, _ROOT) is root
        ]
        if not places:
            asked = "the code under test" if used_by is None else f"`{used_by.__name__}`"
            users = ", ".join(f"`{module.__name__}`" for module in find_users(root)) or "no other module"
            name = f"`{root.__module__}.{root.__qualname__}`"
            raise LookupError(f"{asked} does not know {name}; {users} does")
        stand_ins = {id(value): self._make_stand_in(value, root, call) for _, _, value in places}
        for holder, name, value in places:
            setattr(holder, name, stand_ins[id(value)])
            self._holders.append(holder)
        self.functions.append(root)

    def _make_stand_in(
        self, inner: Callable[..., Any], root: Callable[..., Any], call: Callable[..., Any]
    ) -> Callable[..., Any]:
        @functools.wraps(inner)
        def stand_in(*args: Any, **named: Any) -> Any:
            return call(inner, *args, **named)

        vars(stand_in).update({_ROOT: root, _OWNER: self})
        return stand_in


def find_users(function: Callable[..., Any]) -> list[ModuleType]:
    """Return the loaded modules, other than its own, that have a function: the possible `used_by`."""
    holders = [
        holder
        for holder, _, value in _list_functions(_list_modules())
        if value is function or _attribute(value, _ROOT) is function
    ]
    found = [holder for holder in dict.fromkeys(holders) if isinstance(holder, ModuleType)]
    return [module for module in found if module.__name__ != function.__module__]


def _find_holders(function: Callable[..., Any], written: Callable[..., Any]) -> list[Holder]:
    """Return the class of a method; for a function, all modules except judges and the fault's own."""
    home = sys.modules.get(str(function.__module__))
    *path, _ = function.__qualname__.split(".")
    if path and "<locals>" not in path:
        return [functools.reduce(getattr, path, home)]  # type: ignore[list-item]
    return [module for module in _list_modules() if module is home or not _keeps_originals(module, written)]


def _keeps_originals(module: ModuleType, written: Callable[..., Any]) -> bool:
    return module.__name__ == written.__module__ or f"{module.__name__}.".startswith(_JUDGES)


def _list_modules() -> Iterator[ModuleType]:
    return (module for module in list(sys.modules.values()) if isinstance(module, ModuleType))


def _list_functions(holders: Iterable[Holder]) -> Iterator[tuple[Holder, str, Any]]:
    """Yield each function of a module or class, with its name there."""
    for holder in holders:
        for name, value in list(vars(holder).items()):
            # Compare exact types: some torch objects emit warnings when other attributes are read.
            if type(value) in _FUNCTIONS:
                yield holder, name, value


def _attribute(function: Any, name: str) -> Any:
    """Return an attribute of a stand-in; None for any other function."""
    return vars(function).get(name) if type(function) is FunctionType else None


def _check_arguments(function: Callable[..., Any], written: Callable[..., Any], *, given: int) -> None:
    """Check that `written` accepts all arguments in order, and required keyword-only ones by name.

    `given` arguments come before them.

    Raises: TypeError when it does not.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return  # some C functions have no signature
    in_order = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [each for each in parameters if each.kind in in_order]
    named = {
        each.name: each
        for each in parameters
        if each.kind is each.KEYWORD_ONLY and each.default is each.empty
    }
    try:
        inspect.signature(written).bind(*[None] * given, *positional, **named)
    except TypeError as error:
        raise TypeError(
            f"`{written.__name__}` does not take the arguments of `{function.__qualname__}`: {error}"
        ) from None
