"""Configurations of models: which object or arguments have the sizes of a model, and how to change them."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from moeverify.cases.shrink import guess_size
from moeverify.cases.suggest import find_nearest, suggest
from moeverify.errors import CaseError, Problem
from moeverify.train.custom_subject import call_factory
from moeverify.train.target import describe_error, resolve

_MAKE = "moeverify.stacks.configured:make"
DROPOUT = re.compile("drop", re.IGNORECASE)
_FACTORY = "recipe.model.factory"
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_SET = "give other values as `--set NAME=VALUE`, or name a function that makes the model on the CPU"
_OBJECT = re.compile("conf|cfg|arg|param|setting|opt|spec", re.IGNORECASE)
_UNSET = (None, -1)
_PRESET = 10  # a model of a preset is larger by this than one of small sizes
_MOST_UNSET = 6  # fields without a value; all of their subsets are tried


@dataclass(frozen=True)
class Configuration:
    """The changeable fields of a model.

    `sizes` are its integers, and `rates` its numbers between zero and one. `guessed` are the sizes that the code
    leaves open, and None for the name of a preset that excludes them. `build(changes)` returns the model with
    changed fields, and `name(changes)` the function and arguments with which a recipe builds it.
    """

    sizes: Mapping[str, int]
    rates: Mapping[str, float]
    build: Callable[[Mapping[str, Any]], nn.Module]
    name: Callable[[Mapping[str, Any]], tuple[str, dict[str, Any]]]
    guessed: Mapping[str, int | None] = field(default_factory=dict)


@dataclass(frozen=True)
class _Source:
    """A configuration object that the code makes; `change(**fields)` returns another one."""

    config: Any
    change: Callable[..., Any]
    guessed: Mapping[str, int] = field(default_factory=dict)


def find_configuration(target: str, given: Mapping[str, Any] | None = None) -> Configuration:
    """Return the configuration of the model that `target` makes; `given` are the values of some fields.

    It is one of: the arguments of a function; a configuration object that the only required argument without a
    value takes; the configuration object that a model without arguments keeps. Sizes without a value are guessed.

    Raises: CaseError when the function needs other arguments, or fails.
    """
    given = dict(given or {})
    factory = resolve(target, _FACTORY)
    signature = inspect.signature(factory).parameters
    parameters = [each for each in signature.values() if each.kind not in _VARIADIC]
    missing = [each for each in parameters if each.default is each.empty and each.name not in given]
    guessed = _guess(missing)
    if guessed is None and len(missing) == 1:
        name = missing[0].name
        own = {each.name: given[each.name] for each in parameters if each.name in given}
        inner = {key: value for key, value in given.items() if key not in own}
        _check_required(target, _find_hint(factory, name), inner)
        for source in _list_sources(factory, name, inner):
            _check_added(source, _list_sources(factory, name, {}), inner)
            return _of_object(target, factory, partial(_call_with, factory, own, name), source, inner, own)
        for source in _list_sources(factory, name, {}) if inner else ():
            _refuse_fields(source, inner)
    if guessed is None:
        raise _refuse(target, missing)
    fields = {**given, **guessed}
    plain = {each.name: each.default for each in parameters if each.default is not each.empty}
    sizes, rates = _read_fields({**plain, **guessed}, given)
    if not sizes and not given.keys() & {each.name for each in parameters}:
        built = build_on_meta(lambda: call_factory(factory, {}))
        for config in filter(_is_config, vars(built).values()):
            source = _Source(config, partial(replace, config))
            return _of_object(target, type(built), type(built), source, given, {}, is_whole=True)
    if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.values()):
        _check_names(target, [each.name for each in parameters], given)
    return Configuration(
        sizes,
        rates,
        lambda changes: call_factory(factory, {**fields, **changes}),
        lambda changes: (target, {**fields, **changes}),
        guessed,
    )


def build_on_meta(build: Callable[[], Any]) -> nn.Module:
    """Return a model without memory for its tensors if its code allows that, and as it is if not.

    Raises: CaseError when the code raises, or does not return a module.
    """
    try:
        with torch.device("meta"):
            built = build()
    except Exception:
        try:
            built = build()
        except Exception as error:
            message = f"the factory failed: {describe_error(error)}"
            raise CaseError([Problem(message, path=_FACTORY, remedy=_SET)]) from error
    if not isinstance(built, nn.Module):
        message = f"the factory returned {type(built).__name__} and not a module"
        raise CaseError([Problem(message, path=_FACTORY, remedy="name the function that returns the model")])
    return built


def _refuse(target: str, missing: list[inspect.Parameter]) -> CaseError:
    needed = " and ".join(f"`{each.name}`" for each in missing if _guess([each]) is None)
    called = f"{target.partition(':')[2]}({', '.join(f'{each.name}=...' for each in missing)})"
    message = f"`{target}` needs {needed}, and neither a default nor a configuration with defaults was found"
    remedy = (
        "give plain values as `--set NAME=VALUE`; for objects put a function such as `def make(width=64): return "
        f"{called}` into a module, and name that"
    )
    return CaseError([Problem(message, path=_FACTORY, remedy=remedy)])


def _check_required(target: str, kind: Any, given: Mapping[str, Any]) -> None:
    """Raises: CaseError if the class of a configuration has fields without a default that are no sizes."""
    if not isinstance(kind, type) or not is_dataclass(kind):
        return
    wanted = [
        each.name
        for each in inspect.signature(kind).parameters.values()
        if each.default is each.empty and each.name not in given and _guess([each]) is None
    ]
    if wanted:
        names = " and ".join(f"`{each}`" for each in wanted)
        message = f"`{target}` takes a `{kind.__name__}`, which needs {names}"
        remedy = f"add {' '.join(f'`--set {each}=VALUE`' for each in wanted)}"
        raise CaseError([Problem(message, path=_FACTORY, remedy=remedy)])


def _find_hint(factory: Callable[..., Any], name: str) -> Any:
    """Return the annotation of an argument; None if it names something that does not exist."""
    try:
        return inspect.signature(factory, eval_str=True).parameters[name].annotation
    except NameError:
        return None


def _refuse_fields(source: _Source, given: Mapping[str, Any]) -> NoReturn:
    kind = type(source.config).__name__
    _check_names(kind, list(vars(source.config)), given)
    raise CaseError([Problem(f"`{kind}` does not accept these values", path="--set")])


def _check_added(source: _Source, plain: Iterable[_Source], given: Mapping[str, Any]) -> None:
    """Raises: CaseError if a value becomes a new attribute of the configuration, with a name like that of a field.

    Configurations of transformers keep all that they are given, and models may read names that have no default.
    """
    before = next(iter(plain), None)
    if before is not None:
        known = list(vars(before.config))
        added = (name for name in given if name in vars(source.config) and not hasattr(before.config, name))
        wrong = {name: None for name in added if find_nearest(name, known) is not None}
        _check_names(type(source.config).__name__, known, wrong)


def _check_names(owner: str, known: Sequence[str], given: Mapping[str, Any]) -> None:
    """Raises: CaseError if a field or parameter that is given is none of a configuration or factory."""
    wrong = next((name for name in given if name not in known), None)
    if wrong is not None:
        problem = Problem(f"`{owner}` takes no `{wrong}`", path="--set", remedy=suggest(wrong, known))
        raise CaseError([problem])


def _call_with(factory: Callable[..., Any], own: Mapping[str, Any], name: str, config: Any) -> Any:
    return call_factory(factory, {**own, name: config})


def _of_object(
    target: str,
    factory: Callable[..., Any],
    kind: Callable[[Any], nn.Module],
    source: _Source,
    given: Mapping[str, Any],
    own: Mapping[str, Any],
    *,
    is_whole: bool = False,
) -> Configuration:
    """Return the configuration of a model that `kind(config)` builds, by `factory` with the arguments `own`.

    With `is_whole`, `target` itself builds the unchanged model.
    """
    guessed = {**source.guessed, **({} if is_whole else _find_unset(kind, source, given))}
    fields = {**given, **guessed}
    config = source.change(**fields)
    sizes, rates = _read_fields({**vars(config), **guessed}, given)
    built = factory if isinstance(factory, type) else type(build_on_meta(lambda: kind(config)))
    if built.__module__.startswith("transformers."):
        from moeverify.stacks import transformers

        plain = {**_describe_transformers(config), **fields}

        def build(changes: Mapping[str, Any]) -> nn.Module:
            return transformers.make(**{**plain, **changes})

        return Configuration(
            sizes, rates, build, lambda changes: (f"{transformers.__name__}:make", {**plain, **changes})
        )

    def name(changes: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        if is_whole and not changes and not fields:
            return target, {}
        return _MAKE, {"model": target, "fields": {**own, **fields, **changes}}

    return Configuration(
        sizes, rates, lambda changes: kind(source.change(**{**fields, **changes})), name, guessed
    )


def _find_unset(
    kind: Callable[[Any], nn.Module], source: _Source, given: Mapping[str, Any]
) -> dict[str, int | None]:
    """Return the fewest sizes without a value that a model needs; none if nothing helps.

    The name of a preset may exclude sizes: all of them are tried without it, too. A preset may also fill in large
    sizes: all of them are guessed if that makes the model much smaller.
    """
    values = {name: value for name, value in vars(source.config).items() if name not in given}
    unset = {
        name: size
        for name, value in values.items()
        if value in _UNSET and (size := guess_size(name)) is not None
    }
    subsets = itertools.chain.from_iterable(
        itertools.combinations(list(unset)[:_MOST_UNSET], count)
        for count in range(min(len(unset), _MOST_UNSET) + 1)
    )
    presets = [name for name, value in values.items() if type(value) is str]

    def count(guessed: Mapping[str, int | None]) -> float:
        """Return the number of parameters, or infinity if there is no such model."""
        try:
            with torch.device("meta"):
                built = kind(source.change(**{**source.guessed, **given, **guessed}))
            return sum(each.numel() for each in built.parameters())
        except Exception:  # whatever the user's code raises without a value
            return math.inf

    candidates: Iterator[dict[str, int | None]] = itertools.chain(
        ({name: unset[name] for name in each} for each in subsets),
        ({preset: None, **unset} for preset in presets if unset),
    )
    for guessed in candidates:
        least = count(guessed)
        if least < math.inf:
            is_preset = unset and presets and not guessed and _PRESET * count(unset) < least
            return {**unset} if is_preset else guessed
    return {}


def _guess(missing: list[inspect.Parameter]) -> dict[str, int] | None:
    """Return a size for each required argument, or None if one of them is no size."""
    sizes = {
        each.name: size
        for each in missing
        if each.annotation in (each.empty, int, "int") and not _OBJECT.search(each.name)
        if (size := guess_size(each.name)) is not None
    }
    return sizes if len(sizes) == len(missing) else None


def _describe_transformers(config: Any) -> dict[str, Any]:
    """Return the fields of a configuration of transformers that differ from the defaults of its class."""
    defaults: dict[str, Any] = type(config)().to_dict()
    given = {name: value for name, value in config.to_dict().items() if value != defaults.get(name)}
    own = ("architectures", "transformers_version", "dtype", "layer_types")
    plain = {name: value for name, value in given.items() if name not in own and value is not None}
    return {"model_type": config.model_type, **plain}


def _read_fields(
    values: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[dict[str, int], dict[str, float]]:
    """Return the positive integers of a configuration, and its rates between zero and one, without given ones."""
    plain = {name: value for name, value in values.items() if not name.startswith("_") and name not in given}
    sizes = {name: value for name, value in plain.items() if type(value) is int and value > 0}
    rates = {name: value for name, value in plain.items() if _is_rate(name, value)}
    return {name: value for name, value in sizes.items() if name not in rates}, rates


def _is_rate(name: str, value: Any) -> bool:
    most = 1 if not DROPOUT.search(name) else math.inf  # a rate of one is none of the usual fractions
    return type(value) in (int, float) and 0 < value < most


def _is_config(value: Any) -> bool:
    return (is_dataclass(value) and not isinstance(value, type)) or hasattr(value, "to_diff_dict")


def _list_sources(factory: Callable[..., Any], name: str, given: Mapping[str, Any]) -> Iterator[_Source]:
    """Yield the configuration objects that fit the argument `name`, the most likely first."""
    for kind in (_find_hint(factory, name), getattr(factory, "config_class", None)):
        yield from _make_source(kind, given)
    for key, value in inspect.getmembers(factory, callable) if isinstance(factory, type) else ():
        if "config" in key.lower() and not key.startswith("_"):
            try:
                config = value()
                vars(config)
            except Exception:  # a method that needs more, or returns no object with fields
                continue
            yield _Source(config, partial(_change, config))
    for kind in vars(sys.modules[factory.__module__]).values():
        if is_dataclass(kind):
            yield from _make_source(kind, given)


def _make_source(kind: Any, given: Mapping[str, Any]) -> Iterator[_Source]:
    """Yield the configuration of a class, if it is one and needs no fields but sizes."""
    if not isinstance(kind, type):
        return
    try:
        required = [
            each
            for each in inspect.signature(kind).parameters.values()
            if each.default is each.empty and each.kind not in _VARIADIC and each.name not in given
        ]
        guessed = _guess(required) or {}
        config = kind(**{**guessed, **given})
    except Exception:  # required fields that are no sizes, or fields that it does not have
        return
    if _is_config(config):
        yield _Source(config, partial(kind, **guessed), guessed)


def _change(config: Any, **fields: Any) -> Any:
    changed = copy.deepcopy(config)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed
