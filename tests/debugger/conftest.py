"""A site for each test of the debugger."""

import shutil
import tempfile
from pathlib import Path

import pytest
from debugger_site import Site


@pytest.fixture
def site(python):
    """A fresh site; nothing that it started outlives the test."""
    home = Path(tempfile.mkdtemp(prefix="mpdb-test-", dir="/tmp"))
    made = Site(home, python)
    try:
        yield made
    finally:
        made.clean()
        shutil.rmtree(home, ignore_errors=True)
