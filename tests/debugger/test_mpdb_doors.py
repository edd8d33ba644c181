"""What a program does to its own process while it is stepped: fork, closed descriptors, exec, full disks."""

import errno
import os
import socket

import pytest

from multiprocessing_pdb.rank import endpoint as endpoint_module
from multiprocessing_pdb.rank.endpoint import Endpoint
from multiprocessing_pdb.wire.own_descriptors import OwnDescriptor
from multiprocessing_pdb.wire.own_sockets import OwnSocket
from multiprocessing_pdb.wire.runtime_directory import SOCKET_SUFFIX, VARIABLE, RuntimeDirectory

BREAKPOINT = {"PYTHONBREAKPOINT": "multiprocessing_pdb.set_trace"}


def test_a_rank_is_reached_after_fork_close_and_exec(site):
    (process,) = site.start_ranks(1, "doors.py", env=BREAKPOINT)
    site.await_ranks(1)
    assert "doors.py(16)" in site.ask("s")  # not in what Python calls in the child
    assert site.ask("n", "n").endswith("os.closerange(3, 100)\n")
    closed, listed = site.ask("n", "ls").split("\nrank ", 1)
    assert "the process lives" in closed
    assert "doors.py:20" in listed
    assert "the process has executed another program" in site.ask("n")
    site.await_ranks(1)
    assert "after exec" in site.ask("ls", "c")
    site.await_exit(process)
    assert site.read("rank0") == "child 3\n"
    assert site.sockets() == []


def test_a_program_without_descriptors_stops_or_goes_on(site):
    first, second = site.start_ranks(2, "doors.py", "starve", env=BREAKPOINT)
    site.await_exit(second)
    assert "no stop, OSError: [Errno 24]" in site.read("rank1", "stderr")
    site.await_ranks(1)
    assert site.ask("diff len(taken) > 50") == "rank 0: True\n"
    assert "doors.py:35" in site.ask("n", "ls")
    site.ask("c")
    site.await_exit(first)
    assert site.read("rank0") == site.read("rank1") == "went on\n"


@pytest.mark.parametrize("is_replaced", [False, True])
def test_what_the_program_has_closed_or_replaced_is_not_touched(tmp_path, is_replaced):
    ours, theirs = socket.socketpair()
    file, stream = OwnDescriptor(os.open(tmp_path, os.O_RDONLY)), OwnSocket(ours)
    directory = RuntimeDirectory.open(tmp_path / "run", create=True)
    numbers = [file.number, stream.fileno(), directory._descriptor]
    null = os.open(os.devnull, os.O_RDWR)
    for number in numbers:
        os.dup2(null, number) if is_replaced else os.close(number)
    assert not file.is_open()
    assert not stream.is_open()
    assert directory.names(SOCKET_SUFFIX) == []  # opens itself again
    for own in (file, stream, directory):
        own.close()
    for number in [*numbers, null] if is_replaced else [null]:
        os.close(number)  # else closed already
    theirs.close()


def test_a_socket_that_finds_no_space_comes_when_there_is_some(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setenv(VARIABLE, str(tmp_path / "run"))
    monkeypatch.setattr(endpoint_module, "write_stderr", lines.append)
    endpoint = Endpoint("a.sock", lambda *_: None, lambda _: None)
    (tmp_path / "run" / "a.sock").unlink()

    def refuse(directory, name):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(RuntimeDirectory, "listen", refuse)
        endpoint._tick()
        endpoint._tick()
    endpoint._tick()
    with RuntimeDirectory.open() as directory:
        directory.connect("a.sock").close()
    endpoint.hide()
    endpoint.abandon()
    assert len(lines) == 1
    assert "no console can reach" in lines[0]
