"""Omitted sections of a case equal empty sections."""

from __future__ import annotations

import subprocess
import sys

from moeverify.cases.fields import Section
from moeverify.cases.schema import Case, Checks, Recipe


def test_default_sections_are_valid_sections() -> None:
    defaults = {
        f"{section.__name__}.{name}": field.default
        for section in (Recipe, Checks, Case)
        for name, field in section.model_fields.items()
        if isinstance(field.default, Section)
    }
    assert sorted(defaults) == [
        "Case.checkpoint",
        "Case.checks",
        "Case.layout",
        "Checks.tolerance",
        "Recipe.data",
        "Recipe.optimizer",
    ]
    for default in defaults.values():
        validated = type(default).model_validate({})
        assert default == validated
        assert default.model_fields_set == validated.model_fields_set
        assert default.model_dump_json() == validated.model_dump_json()


def test_the_schema_builds_no_section_before_it_is_read() -> None:
    program = (
        "import moeverify.cases.schema as schema\n"
        "print([name for name, kind in vars(schema).items() if getattr(kind, '__pydantic_complete__', False)])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
