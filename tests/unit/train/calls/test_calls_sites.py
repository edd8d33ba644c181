"""Call sites in a script and in installed libraries."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType

import pytest

from moeverify.train.calls.listener import find_site

LIBRARY = """
def train(find):
    return step(find)

def step(find):
    return find()
"""


@pytest.mark.parametrize(
    ("folder", "prefix"),
    [("site-packages/trainers/inner", "trainers/"), ("project/trainers", "")],
    ids=["library", "script"],
)
def test_a_line_of_a_library_has_its_package_and_the_line_of_the_script(folder: str, prefix: str) -> None:
    module = ModuleType("loop")
    exec(compile(LIBRARY, f"/x/{folder}/loop.py", "exec"), vars(module))
    frame = inspect.currentframe()
    assert frame is not None
    site, line = module.train(find_site), frame.f_lineno
    origin = f" from {Path(__file__).name}:{line}" if prefix else ""
    assert site == f"{prefix}loop.py:6{origin}"
