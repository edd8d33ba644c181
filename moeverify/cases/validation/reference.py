"""The fields of a case file as a reference page and as a JSON schema, generated from the pydantic schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic_core import PydanticUndefined

from moeverify.cases.choice import list_options
from moeverify.cases.expectation import expect, find_sections
from moeverify.cases.fields import Section
from moeverify.cases.presets import PRESETS
from moeverify.cases.schema import Case, CustomModel, Recipe
from moeverify.cases.validation.choices import CHOICES

_HEAD = """# The fields of a case file

A case file is YAML. `moeverify check` lists all problems of one with file, line, field and remedy. An editor that
knows JSON schema completes and explains the fields: `moeverify schema > case.schema.json`, and as the first line of
the case

```yaml
# yaml-language-server: $schema=case.schema.json
```

If a case has `recipe: NAME`, the fields of the recipe are in `recipes/NAME.yaml` beside the case. `base: NAME`,
there or in the case, starts from another recipe that the other fields change. A field of the model that its preset
sets may be changed beside it.

This page is made by `moeverify schema --page`.
"""

# Fields of the schema that no user writes, and a field that only the file reader knows.
_UNWRITTEN = ("file",)
_BASE = ("base", "text", "", "a recipe of `recipes/` that the other fields change")


def render_page() -> str:
    """Return the text of docs/reference/case.md: a table per section, and the options of each choice."""
    parts = [_HEAD]
    for prefix, section in _list_sections("", Case):
        parts.append(_render_section(prefix, section))
    parts.append(_render_choices())
    parts.append(f"## Presets\n\n{', '.join(f'`{name}`' for name in PRESETS)}\n")
    return "\n".join(parts)


def _list_sections(prefix: str, section: type[Section]) -> Iterator[tuple[str, type[Section]]]:
    """Yield each section of a case, before its inner sections, with the prefix of its field names."""
    yield prefix, section
    for name in section.model_fields:
        for inner in find_sections(section, name):
            yield from _list_sections(f"{prefix}{name}.", inner)


def _render_section(prefix: str, section: type[Section]) -> str:
    title = f"`{prefix.rstrip('.')}`" if prefix else "The case"
    if section is CustomModel:
        title += " with a `factory`"
    about = (section.__doc__ or "").replace("\n    ", "\n").strip()
    rows = [_describe_field(section, name) for name in section.model_fields if name not in _UNWRITTEN]
    if section is Recipe:
        rows.insert(0, _BASE)
    table = "".join(f"| `{path}` | {kind} | {default} | {text} |\n" for path, kind, default, text in rows)
    return f"## {title}\n\n{about}\n\n| Field | Type | Default | Meaning |\n|---|---|---|---|\n{table}"


def _describe_field(section: type[Section], name: str) -> tuple[str, str, str, str]:
    field = section.model_fields[name]
    kind = "section" if find_sections(section, name) else expect(section, name).words.replace("one of ", "")
    kind = kind.removesuffix(" or nothing")
    default = "" if field.default is PydanticUndefined else _show_default(field.default)
    if field.is_required() and field.default_factory is None and name != "name":
        default = "required"
    return name, kind.replace("|", "\\|"), default, (field.description or "").replace("|", "\\|")


def _show_default(value: Any) -> str:
    if value is None or value in ("", ()) or isinstance(value, Section):
        return ""
    return f"`{json.dumps(value)}`".replace('"', "")


def _render_choices() -> str:
    lines = ["## Implementations\n"]
    for choice in CHOICES:
        lines.append(f"`{choice.path}`:\n")
        lines += [f"- `{option}`: {choice.explain(option)}" for option in list_options(choice.path)]
        lines.append("")
    return "\n".join(lines)


def make_json_schema() -> dict[str, Any]:
    """Return the JSON schema of a case file for editors. Rules across fields are not included."""
    schema = Case.model_json_schema()
    sections: dict[str, Any] = schema["$defs"]
    for name in _UNWRITTEN:
        del schema["properties"][name]
    schema["required"] = ["recipe"]
    recipe = schema["properties"]["recipe"]
    recipe["anyOf"] = [{"type": "string"}, {"$ref": recipe.pop("$ref")}]
    # A base may set any field of a recipe, and a preset any field of the reference model.
    sections["Recipe"]["properties"]["base"] = {"type": "string", "description": _BASE[3]}
    for name in ("Recipe", "ReferenceModel", "CustomModel"):
        sections[name].pop("required", None)
    sections["ReferenceModel"]["properties"]["preset"]["anyOf"][0]["enum"] = list(PRESETS)
    # Sections of the model may override single fields of a preset.
    for name in ("MoE", "MLA", "Yarn"):
        sections[name].pop("required", None)
    for choice in CHOICES:
        _explain_options(
            schema, choice.path, [choice.explain(option) for option in list_options(choice.path)]
        )
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _explain_options(schema: dict[str, Any], path: str, texts: list[str]) -> None:
    """Add the description of each option next to its name, in the form that editors show."""
    *around, name = path.split(".")
    section = schema
    for part in around:
        found = section["properties"][part]
        reference = found.get("$ref") or next(option["$ref"] for option in found["anyOf"] if "$ref" in option)
        section = schema["$defs"][reference.rpartition("/")[2]]
    section["properties"][name]["enumDescriptions"] = texts
