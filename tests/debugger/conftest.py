"""A site fixture for each debugger test."""

import shutil
import tempfile
from pathlib import Path

import pytest
from debugger_site import Site


@pytest.fixture
def site(python):
    """Yield a fresh site and end everything that it started."""
    home = Path(tempfile.mkdtemp(prefix="mpdb-test-", dir="/tmp"))
    made = Site(home, python)
    try:
        yield made
    finally:
        made.clean()
        shutil.rmtree(home, ignore_errors=True)
