"""The page of all fields and the JSON schema for editors match the schema, and accept every case here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from moeverify.cases.fields import Section
from moeverify.cases.schema import Case
from moeverify.cases.validation.reference import make_json_schema, render_page

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "case.md"
FILES = sorted([*ROOT.glob("cases/**/*.yaml"), *ROOT.glob("examples/**/*.yaml")])
FILES = [file for file in FILES if file.parent.name != "collectives"]  # split sizes for `moeverify comm`
SCHEMA = make_json_schema()


def test_the_page_is_what_the_command_makes() -> None:
    assert PAGE.read_text() == render_page(), "moeverify schema --page > docs/reference/case.md"


def test_every_field_has_a_meaning() -> None:
    rows = re.findall(r"^\| `[^`]+` \| .* \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) > 100
    assert [text for text in rows if not text.strip()] == []


def test_cells_hold_no_bars() -> None:
    tables = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert [line for line in tables if len(re.findall(r"(?<!\\)\|", line)) != 5] == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_an_editor_accepts_the_cases_of_this_repository(file: Path) -> None:
    value = json.loads(json.dumps(YAML(typ="safe").load(file)))
    assert list(find_errors({"recipe": value} if file.parent.name == "recipes" else value)) == []


@pytest.mark.parametrize(
    "case",
    [
        {"recipe": "a", "layout": {"tq": 2}},
        {"recipe": "a", "layout": {"cp": 0}},
        {"recipe": "a", "layout": {"stage_layers": [1, "2"]}},
        {"recipe": "a", "layout": {"context_parallel": "zigzag"}},
        {"recipe": {"model": {"preset": "no such preset"}}},
        {"recipe": {"model": {"factory": "no colon"}}},
        {"recipe": {"optimizer": {"betas": [0.9]}}},
        {"recipe": 1},
        {"layout": {}},
    ],
    ids=str,
)
def test_an_editor_refuses_what_no_field_accepts(case: dict[str, Any]) -> None:
    assert list(find_errors(case))


def test_an_editor_explains_the_options_of_a_choice() -> None:
    field = SCHEMA["$defs"]["Layout"]["properties"]["context_parallel"]
    explained = dict(zip(field["enum"], field["enumDescriptions"], strict=True))
    assert "gathers all keys and values" in explained["allgather"]


def test_sections_of_the_schema_say_what_they_are() -> None:
    def walk(section: type[Section]) -> Iterator[type[Section]]:
        if section.__module__.startswith("moeverify."):  # other tests define their own sections
            yield section
        for inner in section.__subclasses__():
            yield from walk(inner)

    assert [section.__name__ for section in walk(Section) if not section.__doc__] == []
    assert Case in set(walk(Section))


TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}


def find_errors(value: Any, schema: dict[str, Any] = SCHEMA, path: str = "") -> Iterator[str]:
    """Yield violations of a JSON schema in a value, for the keywords that this schema uses."""
    if "$ref" in schema:
        schema = {**SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], **schema}
    if "anyOf" in schema and all(list(find_errors(value, option, path)) for option in schema["anyOf"]):
        yield f"{path}: none of {len(schema['anyOf'])} forms"
    kind = schema.get("type")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind and (not isinstance(value, TYPES[kind]) or (kind in ("integer", "number") and not is_number)):
        yield f"{path}: no {kind}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: not one of {schema['enum']}"
    if "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{path}: not like {schema['pattern']}"
    if is_number:
        low, high = schema.get("minimum", value), schema.get("maximum", value)
        if not low <= value <= high or value <= schema.get("exclusiveMinimum", value - 1):
            yield f"{path}: out of range"
    if isinstance(value, list):
        yield from find_errors_of_items(value, schema, path)
    if isinstance(value, dict):
        yield from find_errors_of_fields(value, schema, path)


def find_errors_of_items(value: list[Any], schema: dict[str, Any], path: str) -> Iterator[str]:
    items = schema.get("prefixItems", [schema.get("items", {})] * len(value))
    if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
        yield f"{path}: {len(value)} items"
    for number, (item, inner) in enumerate(zip(value, items, strict=False)):
        yield from find_errors(item, inner, f"{path}[{number}]")


def find_errors_of_fields(value: dict[str, Any], schema: dict[str, Any], path: str) -> Iterator[str]:
    known = schema.get("properties", {})
    yield from (f"{path}: missing {name}" for name in schema.get("required", ()) if name not in value)
    for name, item in value.items():
        if name in known:
            yield from find_errors(item, known[name], f"{path}.{name}")
        elif schema.get("additionalProperties") is False:
            yield f"{path}: unknown {name}"
