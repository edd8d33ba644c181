"""Option groups: a command that takes a group has all of its options and receives them as one value."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from inspect import Parameter
from typing import Any, Self, get_type_hints


@dataclass(frozen=True)
class OptionGroup:
    """A group of options: a dataclass whose fields are annotated like the parameters of a command."""

    @classmethod
    def list_options(cls) -> Sequence[Parameter]:
        """Return the parameters that replace the group in a command's signature."""
        hints = get_type_hints(cls, include_extras=True)
        return [
            Parameter(
                field.name,
                Parameter.KEYWORD_ONLY,
                default=Parameter.empty if field.default is MISSING else field.default,
                annotation=hints[field.name],
            )
            for field in fields(cls)
        ]

    @classmethod
    def gather(cls, values: Mapping[str, Any]) -> Self:
        """Return the group built from the values of its options."""
        return cls(**values)


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command whose signature has the options of its groups in place of the groups."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, type[OptionGroup]] = {}
    parameters: list[Parameter] = []
    for parameter in signature.parameters.values():
        if isinstance(parameter.annotation, type) and issubclass(parameter.annotation, OptionGroup):
            groups[parameter.name] = parameter.annotation
            parameters.extend(parameter.annotation.list_options())
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            own = {option.name: values.pop(option.name) for option in group.list_options()}
            values[name] = group.gather(own)
        command(**values)

    # Typer reads both.
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
