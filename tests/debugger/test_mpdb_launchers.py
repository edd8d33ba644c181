"""Ranks stop under every launcher and stream redirection, and their streams are untouched."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest
from debugger_site import PROGRAMS, poll

TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]


def drop_notice(stderr):
    """Return stderr without the debugger's own lines, and the number of such lines."""
    lines = stderr.splitlines(keepends=True)
    notices = [line for line in lines if line.startswith("multiprocessing_pdb: ")]
    return "".join(line for line in lines if line not in notices), notices


def test_streams_are_untouched_by_a_stop(site):
    """Run the same program with and without a stop: bytes in and out and descriptors are the same."""
    outputs = []
    for disabled in ("1", "0"):
        process = site.start_python(
            "work.py",
            "read",
            stdin=subprocess.PIPE,
            name=f"run{disabled}",
            env={"RANK": "0", "WORLD_SIZE": "2", "MPDB_JOB": site.job, "MPDB_DISABLE": disabled},
        )
        if disabled == "0":
            before = [Path(f"/proc/{process.pid}/fd/{n}").readlink() for n in range(3)]
            site.await_ranks(1)
            assert [Path(f"/proc/{process.pid}/fd/{n}").readlink() for n in range(3)] == before
            site.ask("@0 p value", "@0 print('to the console')", "@0 next", "c")
        process.stdin.write(b"for the program\n")
        process.stdin.close()
        site.await_exit(process)
        outputs.append((site.read(f"run{disabled}"), site.read(f"run{disabled}", "stderr")))
    stderr, notices = drop_notice(outputs[1][1])
    assert (outputs[1][0], stderr) == outputs[0]
    assert "read 'for the program\\n'" in outputs[1][0]
    assert len(notices) == 1
    assert f"-m multiprocessing_pdb {site.job}" in notices[0]


def test_what_other_threads_print_during_a_command_stays_the_programs(site):
    """pdb replaces sys.stdout with its own stream while it runs a statement."""
    (rank,) = site.start_ranks(1, "ticking.py")
    site.await_ranks(1)
    shown = site.ask("@0 import time; time.sleep(1); print('mine')")
    site.ask("c")
    site.await_exit(rank)
    assert shown == "rank 0: mine\n"
    numbers = [int(number) for number in re.findall(r"tick (\d+)\n", site.read("rank0"))]
    assert len(numbers) > 10
    assert numbers == list(range(len(numbers)))


def test_a_closed_stdin_stays_closed(site):
    """Descriptor 0 is free in such a program; no socket of the debugger may become its stdin."""
    command = f"exec {sys.executable} {PROGRAMS / 'work.py'} 0<&-"
    process = site.start("sh", "-c", command, env={"RANK": "0", "WORLD_SIZE": "2", "MPDB_JOB": site.job})
    site.await_ranks(1)
    # A file that the rank has open for a moment, such as a module that it imports, takes the free descriptor.
    poll(lambda: not os.path.lexists(f"/proc/{process.pid}/fd/0"), "free descriptor")
    site.ask("c")
    site.await_exit(process)


@pytest.mark.parametrize(
    "opened",
    [
        "OwnDescriptor(os.memfd_create('x')).number",
        "(own := OwnSocket(socket.socket())).fileno()",
        "RuntimeDirectory.open()._descriptor",
        "directory.create('file')",
        "(listener := directory.listen('name')).fileno()",
        "(listener := directory.listen('name'), stream := directory.connect('name'))[1].fileno()",
    ],
)
def test_no_file_of_the_debugger_becomes_a_standard_stream(opened, tmp_path):
    """Descriptor 0 becomes free between two files that the debugger opens."""
    program = f"""
import os, socket
from multiprocessing_pdb.wire.own_descriptors import OwnDescriptor
from multiprocessing_pdb.wire.own_sockets import OwnSocket
from multiprocessing_pdb.wire.runtime_directory import RuntimeDirectory
directory = RuntimeDirectory.open()
os.close(0)
descriptor = {opened}
assert descriptor > 2 and os.path.exists(f"/proc/self/fd/{{descriptor}}"), descriptor
assert not os.path.lexists("/proc/self/fd/0")
"""
    tmp_path.chmod(0o700)
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "MPDB_DIR": str(tmp_path)}, check=True)


@pytest.mark.parametrize(
    ("stdin", "flags"),
    [
        ("closed", []),
        ("redirected", ["--redirects", "3", "--log-dir", "logs"]),
        ("piped", ["--tee", "3", "--local-ranks-filter", "0", "--log-dir", "logs"]),
        ("terminal", []),
    ],
)
def test_under_torchrun(site, stdin, flags):
    start = site.python.command() if flags else [sys.executable]  # ranks are new processes in either case
    command = [*start, *TORCHRUN, *flags, PROGRAMS / "work.py"]
    env = {"MPDB_JOB": site.job}
    if stdin == "terminal":
        child = site.open_terminal(*command, env=env)
    elif stdin == "closed":
        line = " ".join(map(str, command))
        process = site.start("sh", "-c", f"exec {line} 0<&-", env=env)
    else:
        streams = {"redirected": subprocess.DEVNULL, "piped": subprocess.PIPE}
        process = site.start(*command, env=env, stdin=streams[stdin])
    site.await_ranks(2)
    assert site.ask("diff special").splitlines() == ["rank 0: 'even'", "rank 1: 'odd'"]
    assert site.ask("c") == "ranks 0-1: runs on\n"
    if stdin == "terminal":
        child.expect_exact("after")
        child.expect_exact("after")
        child.expect(pexpect.EOF)
        child.close()
        assert child.exitstatus == 0
    else:
        site.await_exit(process)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_under_multiprocessing_with_nested_children(site, method):
    process = site.start_python("families.py", method)
    text = site.await_ranks(4)
    assert text.startswith("4 stopped: processes p")
    groups = dict(line.split(": ")[::-1] for line in site.ask("diff depth").splitlines())
    assert sorted(groups) == ["0", "1"]
    assert all(len(re.findall(r"p\d+", names)) == 2 for names in groups.values())
    site.ask("c")
    site.await_exit(process)
    assert "codes [0, 0]" in site.read()


def test_a_worker_that_inherits_a_rank_is_not_that_rank(site):
    process = site.start_python("families.py", "fork", env={"RANK": "5", "WORLD_SIZE": "8"})
    site.await_ranks(4)
    table = site.ask("ls")
    assert len(re.findall(r"^5\.p\d+ ", table, re.MULTILINE)) == 4
    site.ask("c")
    site.await_exit(process)


@pytest.mark.parametrize("flags", [[], ["-s"], ["-n", "2"]])
def test_under_pytest(site, flags):
    (site.home / "test_inner.py").write_text(
        "import pytest\n"
        "from multiprocessing_pdb import MultiprocessingPdb\n"
        "Tra = MultiprocessingPdb().set_trace\n"
        "@pytest.mark.parametrize('number', [1, 2])\n"
        "def test_inner(number):\n"
        "    Tra(header=f'number {number}')\n"
        "    print('inner', number)\n"
        "    assert number\n"
    )
    plugins = ["-p", "no:cacheprovider", "-p", "xdist"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, *flags, "test_inner.py"]
    process = site.start(*command, env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
    if "-n" in flags:
        site.await_ranks(2)
        assert site.ask("diff number").count("process p") == 2
        site.ask("c")
    else:
        for number in (1, 2):
            poll(lambda n=number: f"number {n}" in site.ask("ls"), "the stop")
            # While the test waits: pytest shows captured output only after the test has ended.
            shown = site.read() + site.read(stream="stderr")
            assert shown.count("stopped at") == number
            site.ask("c")
    site.await_exit(process)
    assert "2 passed" in site.read()


def test_64_ranks_at_once(site):
    process = site.start_python("crowd.py", "64")
    site.await_ranks(64)
    assert site.ask("diff loss", options=["--deadline", "30"]).splitlines() == [
        "ranks 0-36, 38-63: 3.14",
        "rank 37: nan",
    ]
    assert site.ask("c", options=["--deadline", "30"]) == "ranks 0-63: runs on\n"
    site.await_exit(process)
    assert "codes 0" in site.read()


def test_conditions_of_tra(site):
    (rank,) = site.start_ranks(1, "conditions.py")
    conditions = r"(?:ranks|when|callable|skip|every|once) \d"
    stops = []
    while len(stops) < 7:
        # On a busy machine a rank that has just stopped may be listed without its line.
        stops += poll(lambda: re.findall(conditions, site.ask("ls")), "a stop")
        site.ask("c")
    site.await_exit(rank)
    assert stops == ["once 0", "every 2", "when 3", "callable 4", "skip 5", "every 5", "skip 6"]


@pytest.mark.parametrize("where", ["main", "thread", "fork", "spawn", "torch"])
def test_uncaught_exceptions_stop(site, where):
    process = site.start_python("uncaught.py", where, env={"MPDB_JOB": site.job, "RANK": "0"})
    site.await_ranks(1)
    assert "ValueError: from" in site.ask("ls")
    culprit = "child" if where in ("fork", "spawn", "torch") else where
    assert site.ask("diff culprit").endswith(f": '{culprit}'\n")
    site.ask("c")
    if where == "torch":  # the parent raises the child's exception again: another uncaught exception
        poll(lambda: "ProcessRaisedException" in site.ask("ls"), "the parent's stop")
        site.ask("c")
    site.await_exit(process, 1 if where in ("main", "torch") else 0)
    assert "ValueError: from" in site.read(stream="stderr")


@pytest.mark.parametrize("where", ["breakpoint", "post_mortem"])
def test_breakpoint_and_post_mortem(site, where):
    process = site.start_python("uncaught.py", where, env={"MPDB_JOB": site.job, "RANK": "0"})
    site.await_ranks(1)
    expected = {"breakpoint": "breakpoint", "post_mortem": "handled"}[where]
    assert site.ask("diff culprit") == f"rank 0: '{expected}'\n"
    site.ask("c")
    site.await_exit(process)
    assert "went on" in site.read()


def test_pythonbreakpoint_alone_is_enough(site):
    code = "import os\nx = 41\nbreakpoint()\nprint('went on')\n"
    (site.home / "plain.py").write_text(code)
    env = {"MPDB_JOB": site.job, "RANK": "0", "PYTHONBREAKPOINT": "multiprocessing_pdb.set_trace"}
    process = site.start(sys.executable, "plain.py", env=env)
    site.await_ranks(1)
    assert site.ask("diff x") == "rank 0: 41\n"
    site.ask("c")
    site.await_exit(process)


@pytest.mark.parametrize("flavour", ["pdb", "pdbpp"])
def test_a_single_process_with_a_terminal_gets_its_prompt_there(site, flavour):
    child = site.open_terminal(sys.executable, PROGRAMS / "work.py", env={"MPDB_PDB": flavour})
    child.expect_exact("(Pdb++) " if flavour == "pdbpp" else "(Pdb) ")
    assert site.sockets() == []
    child.sendline("p special")
    child.expect_exact("'even'")
    child.sendline("c")
    child.expect_exact("after")
    child.expect(pexpect.EOF)
