"""Wraps functions of the code under test for as long as a block lasts: how a fault breaks it."""

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
"""The type of a wrapper's first argument: `original: Original[Tensor]`."""

Holder = ModuleType | type

_FUNCTIONS = frozenset({FunctionType, BuiltinFunctionType})

# What judges a run keeps the originals: a fault breaks the code under test, never the comparison.
_JUDGES = ("moeverify.checks.", "moeverify.compare.", "moeverify.diagnose.", "moeverify.golden.")

# Attributes of a stand-in: the function that it stands for at the root, and the patch that has put it there.
_ROOT, _OWNER = "_patched_function", "_patched_by"


class Patch:
    """Wraps and replaces functions and methods, and puts the originals back when its block ends, errors included.

    A function is replaced under every name by which a loaded module knows it, a method in its class. Two
    exceptions: what compares and diagnoses keeps the original, and so does the module of the wrapper, which may
    call it. With `used_by` the one module that is named sees the replacement, which tells apart the call sites of
    a collective, and is the way to wrap a function of torch for our calls of it alone.

    Wrappers compose: the last one put on runs first, and its `original` is the one before. So do patches, inner
    blocks on outer ones.

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
        self._is_open = False

    def __enter__(self) -> Patch:
        self._is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self._is_open = False
        # A module that was imported within the block has bound what it found: look everywhere once more.
        for holder, name, value in _list_functions(dict.fromkeys([*_list_modules(), *self._holders])):
            before = value
            while _attribute(before, _OWNER) is self:
                before = before.__wrapped__
            if before is not value:
                setattr(holder, name, before)

    def wrap(
        self, function: Callable[P, R], *, used_by: ModuleType | None = None
    ) -> Callable[[Callable[Concatenate[Callable[P, R], P], R]], Callable[Concatenate[Callable[P, R], P], R]]:
        """Return a decorator; what it decorates is called for `function`, with the original as its first argument.

        Raises: LookupError where no module, or not `used_by`, knows the function; TypeError where the wrapper does
        not take its arguments; RuntimeError outside of the block.
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
        """Return a decorator as `wrap` does, for what does without the original."""

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
        """Put stand-ins for `function` everywhere; they run `call`. `written` is what the fault's author wrote."""
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
    """Return the loaded modules that know a function by some name and are not its own: where it can be `used_by`."""
    holders = [
        holder
        for holder, _, value in _list_functions(_list_modules())
        if value is function or _attribute(value, _ROOT) is function
    ]
    found = [holder for holder in dict.fromkeys(holders) if isinstance(holder, ModuleType)]
    return [module for module in found if module.__name__ != function.__module__]


def _find_holders(function: Callable[..., Any], written: Callable[..., Any]) -> list[Holder]:
    """Return the class of a method; of a function all modules that may know it, less judges and the fault's own."""
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
    """Yield each function that a module or class knows, with its name there."""
    for holder in holders:
        for name, value in list(vars(holder).items()):
            # By its type alone: torch has values that warn when they are asked for more.
            if type(value) in _FUNCTIONS:
                yield holder, name, value


def _attribute(function: Any, name: str) -> Any:
    """Return an attribute of a stand-in, None of any other function."""
    return vars(function).get(name) if type(function) is FunctionType else None


def _check_arguments(function: Callable[..., Any], written: Callable[..., Any], *, given: int) -> None:
    """Raise TypeError unless `written` takes all arguments in order, and by name what has no default and no place.

    `given` arguments come before them.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return  # some functions in C have none
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
