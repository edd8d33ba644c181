"""Recognition of case files among the YAML files of a pytest session; imports only pytest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

# A field `recipe`, or a field `layout` whose value is not a plain scalar, at the top level of a block or
# flow mapping.
_CASE = re.compile(
    rb"""^(?:\xef\xbb\xbf)?(?:\{\s*)?["']?(?:recipe["']?\s*:|layout["']?\s*:\s*(?:\{|\#|$))""", re.MULTILINE
)


def is_asked_for(config: pytest.Config) -> bool:
    """Return whether the user named paths to collect, on the command line or by `testpaths`.

    A bare `pytest` without `testpaths` collects everything, and must not pick up files that are not meant
    as tests.
    """
    return config.args_source is not pytest.Config.ArgsSource.INVOCATION_DIR


def looks_like_case(path: Path) -> bool:
    """Return whether a file has a top-level field that is typical of cases."""
    from moeverify.input_file import read_input  # local, so that sessions without cases do not pay for it

    try:
        return _CASE.search(read_input(path)) is not None
    except OSError:
        return False
