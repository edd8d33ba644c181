"""Models whose sizes are in a configuration: built with some fields changed. Losses of usual outputs.

A case names `make` of this module, which builds a model like its author's code, but smaller:

    recipe:
      model:
        factory: moeverify.stacks.configured:make
        arguments: {model: "nanogpt.model:GPT", fields: {n_layer: 2, n_embd: 32}}
        loss: moeverify.stacks.configured:loss_with_targets
        vocab_size: 64
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moeverify.errors import CaseError, Problem
from moeverify.stacks.constants import offset_constants
from moeverify.train.forward import cross_entropy
from moeverify.train.target import describe_error, resolve

_DROPOUT = re.compile("drop", re.IGNORECASE)
_FACTORY = "recipe.model.factory"
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Configuration:
    """The changeable fields of a model.

    `sizes` are its integers, and `rates` its dropout rates above zero. `build(changes)` returns the model with
    changed fields, and `name(changes)` the function and arguments with which a recipe builds it.
    """

    sizes: Mapping[str, int]
    rates: Mapping[str, float]
    build: Callable[[Mapping[str, Any]], nn.Module]
    name: Callable[[Mapping[str, Any]], tuple[str, dict[str, Any]]]


def make(model: str, fields: Mapping[str, Any], *, spread: float = 0.1) -> nn.Module:
    """Return a model with some fields of its configuration changed, and without dropout.

    `model` names a function or class, as `package.module:name`. Constant tensors get random offsets of scale
    `spread`; see `offset_constants`.

    Raises: CaseError when the model has no configuration.
    """
    built = find_configuration(model).build(fields)
    for each in list_dropouts(built):
        each.p = 0.0
    offset_constants(built.parameters(), spread)
    return built


def list_dropouts(model: nn.Module) -> list[Any]:
    """Return the dropout modules of a model with a rate above zero."""
    return [
        each for each in model.modules() if isinstance(each, nn.modules.dropout._DropoutNd) and each.p > 0
    ]


def find_configuration(target: str) -> Configuration:
    """Return the configuration of the model that `target` makes.

    It is one of: the arguments of a function with defaults; a configuration object that the only required
    argument takes; the configuration object that a model without arguments keeps.

    Raises: CaseError when the function needs other arguments, or fails.
    """
    factory = resolve(target, _FACTORY)
    parameters = inspect.signature(factory).parameters.values()
    required = [each for each in parameters if each.default is each.empty and each.kind not in _VARIADIC]
    if len(required) > 1:
        names = ", ".join(each.name for each in required)
        remedy = "name a function with defaults for all arguments, or with one argument for a configuration"
        raise CaseError([Problem(f"`{target}` needs the arguments {names}", path=_FACTORY, remedy=remedy)])
    if required:
        config = next(_list_configs(factory, required[0].name), None)
        if config is None:
            message = (
                f"`{target}` needs `{required[0].name}`, and no configuration with defaults was found for it"
            )
            remedy = "annotate it with a dataclass whose fields have defaults, or name a function without arguments"
            raise CaseError([Problem(message, path=_FACTORY, remedy=remedy)])
        return _of_object(target, factory, config, type(config))
    sizes, rates = _read_fields({each.name: each.default for each in parameters})
    if not sizes:
        built = build_on_meta(factory)
        for config in filter(_is_config, vars(built).values()):
            return _of_object(target, type(built), config, partial(replace, config), is_whole=True)
    return Configuration(
        sizes, rates, lambda changes: factory(**changes), lambda changes: (target, dict(changes))
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
            raise CaseError(
                [Problem(f"the factory failed: {describe_error(error)}", path=_FACTORY)]
            ) from error
    if not isinstance(built, nn.Module):
        message = f"the factory returned {type(built).__name__} and not a module"
        raise CaseError([Problem(message, path=_FACTORY, remedy="name the function that returns the model")])
    return built


def _of_object(
    target: str,
    kind: Callable[[Any], nn.Module],
    config: Any,
    change: Callable[..., Any],
    *,
    is_whole: bool = False,
) -> Configuration:
    """Return the configuration of a model that `kind(config)` builds; `change(**fields)` returns another one.

    With `is_whole`, `target` itself builds the unchanged model.
    """
    sizes, rates = _read_fields(vars(config))
    built = kind if isinstance(kind, type) else type(build_on_meta(lambda: kind(config)))
    if built.__module__.startswith("transformers."):
        from moeverify.stacks import transformers

        plain = _describe_transformers(config)

        def build(changes: Mapping[str, Any]) -> nn.Module:
            return transformers.make(**{**plain, **changes})

        return Configuration(
            sizes, rates, build, lambda changes: (f"{transformers.__name__}:make", {**plain, **changes})
        )

    def name(changes: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        if is_whole and not changes:
            return target, {}
        return f"{__name__}:make", {"model": target, "fields": dict(changes)}

    return Configuration(sizes, rates, lambda changes: kind(change(**changes)), name)


def _describe_transformers(config: Any) -> dict[str, Any]:
    """Return the fields of a configuration of transformers that differ from the defaults of its class."""
    defaults: dict[str, Any] = type(config)().to_dict()
    given = {name: value for name, value in config.to_dict().items() if value != defaults.get(name)}
    own = ("architectures", "transformers_version", "dtype", "layer_types")
    plain = {name: value for name, value in given.items() if name not in own and value is not None}
    return {"model_type": config.model_type, **plain}


def _read_fields(values: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, float]]:
    """Return the positive integers of a configuration, and its dropout rates above zero."""
    plain = {name: value for name, value in values.items() if not name.startswith("_")}
    sizes = {name: value for name, value in plain.items() if type(value) is int and value > 0}
    rates = {
        name: value
        for name, value in plain.items()
        if _DROPOUT.search(name) and type(value) in (int, float) and value > 0
    }
    return {name: value for name, value in sizes.items() if name not in rates}, rates


def _is_config(value: Any) -> bool:
    return (is_dataclass(value) and not isinstance(value, type)) or hasattr(value, "to_diff_dict")


def _list_configs(factory: Callable[..., Any], name: str) -> Iterator[Any]:
    """Yield the objects with default values that fit the argument `name`, the most likely first."""
    try:
        hint = inspect.signature(factory, eval_str=True).parameters[name].annotation
    except NameError:  # an annotation that names something that does not exist
        hint = None
    module = sys.modules[factory.__module__]
    beside = [each for each in vars(module).values() if isinstance(each, type) and is_dataclass(each)]
    for kind in (hint, getattr(factory, "config_class", None), *beside):
        if not isinstance(kind, type):
            continue
        try:
            config = kind()
        except Exception:  # fields without defaults
            continue
        if _is_config(config):
            yield config


def loss_of_first(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of each token, (B, S), from the logits among several outputs."""
    return cross_entropy(find_logits(model(tokens), tokens), targets)


def loss_with_targets(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of each token, (B, S), of a model that gives all logits only with targets."""
    return cross_entropy(find_logits(model(tokens, targets.clamp(min=0)), tokens), targets)


def find_logits(output: Any, tokens: Tensor) -> Tensor:
    """Return the first output of shape (B, S, V).

    Raises: CaseError when there is none.
    """
    parts = output.values() if isinstance(output, Mapping) else output
    for part in parts if isinstance(parts, tuple | list) or isinstance(output, Mapping) else [output]:
        if isinstance(part, Tensor) and part.ndim == 3 and part.shape[:2] == tokens.shape:
            return part.full_tensor() if isinstance(part, DTensor) else part
    message = "no output of the model has the shape (rows, positions, vocabulary)"
    raise CaseError([Problem(message, path="recipe.model", remedy="write a `loss(model, tokens, targets)`")])
