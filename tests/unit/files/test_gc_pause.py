"""Objects are created with garbage collection paused, and it resumes afterwards."""

from __future__ import annotations

import gc

import pytest

from moeverify.gc_pause import uncollected


def test_the_collector_rests_inside_and_goes_on_outside() -> None:
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_error_inside_leaves_it_as_it_was() -> None:
    with pytest.raises(ValueError, match="broken"), uncollected():
        raise ValueError("broken")
    assert gc.isenabled()
