"""Forked ranks start together: another thread of the parent may hold a lock that a fork would copy."""

from __future__ import annotations

import os
import select

from moeverify.verification.launch.agent import Gate


def fork_a_rank(gate: Gate, passed: int) -> int:
    pid = os.fork()
    if pid == 0:
        gate.wait()
        os.write(passed, b"x")
        os._exit(0)
    return pid


def test_no_rank_passes_before_the_last_is_forked() -> None:
    gate = Gate()
    reader, writer = os.pipe()
    pids = [fork_a_rank(gate, writer), fork_a_rank(gate, writer)]
    assert select.select([reader], [], [], 0.3)[0] == []
    pids.append(fork_a_rank(gate, writer))
    gate.open()
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0, 0]
    assert os.read(reader, 8) == b"xxx"
    os.close(reader)
    os.close(writer)
