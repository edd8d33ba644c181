"""Which YAML files of a pytest session are cases. Imports nothing but pytest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

# A field `recipe`, or a field `layout` that is no single word, at the top level of a mapping in either style.
_CASE = re.compile(
    rb"""^(?:\xef\xbb\xbf)?(?:\{\s*)?["']?(?:recipe["']?\s*:|layout["']?\s*:\s*(?:\{|\#|$))""", re.MULTILINE
)


def is_asked_for(config: pytest.Config) -> bool:
    """Return whether the user named what to collect, on the command line or by `testpaths`.

    A bare `pytest` in a repository without `testpaths` looks everywhere, and must not find what is no test.
    """
    return config.args_source is not pytest.Config.ArgsSource.INVOCATION_DIR


def looks_like_case(path: Path) -> bool:
    """Return whether a file has a field at its top level that every case has."""
    from moeverify.input_file import read_input  # here: sessions without cases pay for nothing

    try:
        return _CASE.search(read_input(path)) is not None
    except OSError:
        return False
