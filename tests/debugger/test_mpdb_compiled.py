"""Stops inside functions that torch.compile compiles: in the user's frame, with all its locals."""

import os

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import multiprocessing_pdb
from multiprocessing_pdb import MultiprocessingPdb
from multiprocessing_pdb.rank import stop as stop_module

Tra = MultiprocessingPdb().set_trace


def step_out(site):
    """Check the stop in `inner`, step to its caller, and continue."""
    site.await_ranks(1)
    assert site.ask("@0 p sorted(locals())") == "rank 0: ['dead', 'stop', 'value']\n"
    assert "return value + 1" in site.ask("where").splitlines()[-1]
    assert site.ask("n", "n").endswith("return second * 2\n")
    assert site.ask("@0 p sorted(locals())") == "rank 0: ['inner', 'second', 'stop', 'unused', 'value']\n"
    site.ask("c")


def test_a_compiled_function_is_stepped_like_any_other(site):
    env = {"PYTHONBREAKPOINT": "multiprocessing_pdb.set_trace"}
    (process,) = site.start_ranks(1, "compiled.py", env=env)
    step_out(site)
    step_out(site)
    site.await_ranks(1)
    assert "compiled: its next call has all locals" in site.ask("ls", "c")
    step_out(site)
    site.await_exit(process)
    assert site.read("rank0") == "[4.0, 4.0]\n" * 4


class Module(torch.nn.Module):
    def forward(self, value):
        dead = value + 1  # noqa: F841
        Tra()
        return value * 2


def in_checkpoint(value):
    def part(value):
        dead = value + 1  # noqa: F841
        Tra(header="part")
        return value * 2

    return checkpoint(part, value, use_reentrant=False)


def in_block(value):
    dead = value + 1  # noqa: F841
    with torch.no_grad():
        try:
            Tra(when=value.sum() > -100)
        finally:
            value = value * 2
    return value


def in_loop(value):
    for dead in range(2):  # noqa: B007
        Tra(when=lambda: True)
    return value * 2


def by_stop(value):
    dead = value + 1  # noqa: F841
    multiprocessing_pdb.stop("here", frame_locals={"more": 1})
    return value * 2


def never(value):
    Tra(when=False)
    return value * 2


FUNCTIONS = [Module(), in_checkpoint, in_block, in_loop, by_stop]


@pytest.fixture
def stopped(monkeypatch):
    """Return the locals of each frame that would stop."""
    found = []
    monkeypatch.setattr(stop_module, "stop_at", lambda frame, *_, **__: found.append(set(frame.f_locals)))
    yield found
    torch._dynamo.reset()


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_stop_has_all_locals_and_the_result_of_any_run(stopped, function, is_full):
    run = torch.compile(function, backend="eager", fullgraph=is_full)
    value = torch.ones(2)
    for _ in range(2):
        assert torch.equal(run(value), value * 2)
    assert len(stopped) >= 2
    assert all("dead" in names for names in stopped)


@pytest.mark.parametrize("function", [never, *FUNCTIONS])
def test_what_cannot_stop_stays_compiled(stopped, function, monkeypatch):
    if function is not never:
        monkeypatch.setitem(os.environ, "MPDB_DISABLE", "1")
    run = torch.compile(function, backend="eager", fullgraph=True)
    assert torch.equal(run(torch.ones(2)), torch.full((2,), 2.0))
    assert not stopped
