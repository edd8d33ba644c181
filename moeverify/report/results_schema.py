"""The JSON schema of the results of commands: of every `--json`, and of `--json-brief`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from moeverify.results.answer import CommandAnswer
from moeverify.results.benchmark_rows import FaultRow
from moeverify.results.bisection import Bisection
from moeverify.results.brief import Brief
from moeverify.results.collective_run import CollectiveRun
from moeverify.results.measurement import BenchRun
from moeverify.results.mutation import MutantRow
from moeverify.results.operator_table import OperatorTable
from moeverify.results.probe import Diagnostics
from moeverify.results.route import RouteReport
from moeverify.results.run import RunResult

Schema = dict[str, Any]

_WHOLE: Sequence[type[BaseModel]] = (
    RunResult,
    Brief,
    CommandAnswer,
    Bisection,
    BenchRun,
    CollectiveRun,
    Diagnostics,
    OperatorTable,
)
_ROWS: dict[str, type[BaseModel]] = {"faults": FaultRow, "mutants": MutantRow}
_INTEGER: Schema = {"type": "integer"}
_NUMBER: Schema = {"type": "number"}
_PLACEMENT: Schema = {
    "type": "object",
    "properties": {
        "format": {"const": "moeverify plan"},
        "version": {"const": 1},
        "trace": {"type": "object"},
        "num_ranks": _INTEGER,
        "num_nodes": _INTEGER,
        "num_slots": _INTEGER,
        "before": {"type": "object"},
        "after": {"type": "object"},
        "bound": {"type": "array", "items": {"type": "array", "items": _NUMBER}},
        "gap": _NUMBER,
        "seconds": _NUMBER,
        "moves": {"type": "array", "items": {"type": "object"}},
        "max_moves": _INTEGER,
        "gain_share": {"anyOf": [_NUMBER, {"type": "null"}]},
        "moves_of_best": {"anyOf": [_INTEGER, {"type": "null"}]},
    },
    "required": ["format", "version", "num_ranks", "num_nodes", "num_slots", "before", "after", "moves"],
    "additionalProperties": False,
}


class _WithInfinities(GenerateJsonSchema):
    """Schemas in which numbers that are not finite are strings, as a `Record` writes them."""

    def float_schema(self, schema: Any) -> Schema:
        """Return the schema of a number."""
        return {"anyOf": [super().float_schema(schema), {"enum": ["NaN", "Infinity", "-Infinity"]}]}


def make_results_schema() -> Schema:
    """Return one schema for `--json` of all commands and for `--json-brief`."""
    kinds: Sequence[type[BaseModel]] = (*_WHOLE, RouteReport, *_ROWS.values())
    names, whole = models_json_schema(
        [(kind, "serialization") for kind in kinds],
        title="Results of moeverify",
        schema_generator=_WithInfinities,
    )
    definitions = whole["$defs"]
    _define(definitions, "RunResult")["checksum"] = {"type": "string", "description": "of the lines above"}
    routes = {"type": "array", "items": names[RouteReport, "serialization"]}
    rows = [_describe_rows(definitions, key, kind.__name__) for key, kind in _ROWS.items()]
    objects = [names[kind, "serialization"] for kind in _WHOLE]
    return {**whole, "anyOf": [*objects, *rows, _PLACEMENT, routes]}


def _define(definitions: Schema, name: str) -> Schema:
    properties: Schema = definitions[name]["properties"]
    return properties


def _describe_rows(definitions: Schema, key: str, row: str) -> Schema:
    """Return the schema of a file with rows, which have no `finding`, under a key."""
    del _define(definitions, row)["finding"]
    texts = {"type": "object", "additionalProperties": {"type": "string"}}
    items = {"type": "array", "items": {"$ref": f"#/$defs/{row}"}}
    properties = {"command": {"type": "string"}, "environment": texts, key: items}
    return {"type": "object", "properties": properties, "required": [*properties]}
