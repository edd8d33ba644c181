"""The command line: python -m multiprocessing_pdb [JOB] [options]."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from multiprocessing_pdb.console import relay, remote
from multiprocessing_pdb.console.registry import RankRegistry
from multiprocessing_pdb.console.shell import Shell
from multiprocessing_pdb.console.source import LocalSource, Source, TcpSource
from multiprocessing_pdb.console.terminal import Terminal, warn
from multiprocessing_pdb.wire.handshake import TokenError, create_token, read_token, token_path
from multiprocessing_pdb.wire.runtime_directory import DirectoryRefusedError


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m multiprocessing_pdb",
        description="Opens a console for the stopped ranks of this user. Leaving it leaves them stopped.",
    )
    add = parser.add_argument
    add(
        "job",
        nargs="?",
        metavar="JOB",
        help="the job, as its ranks wrote it to stderr; may be left out if alone",
    )
    add(
        "-c",
        "--command",
        action="append",
        default=[],
        metavar="CMD",
        help="do this and leave; may be repeated",
    )
    add("--deadline", type=float, default=5.0, metavar="SECONDS", help="how long each rank has to answer (5)")
    more: dict[str, Any] = {"action": "append", "default": []}
    add("--ssh", **more, metavar="HOST", help="also the ranks of another node, through ssh")
    add("--srun", metavar="JOBID", help="also the ranks of every node of a Slurm job, through srun")
    add("--via", **more, metavar="COMMAND", help="as --ssh, through any command that runs a line")
    add("--python", default=sys.executable, metavar="PATH", help="the Python of the other nodes")
    add(
        "--tcp",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="also a rank that listens on TCP (MultiprocessingPdb(tcp=...))",
    )
    add(
        "--token-file",
        type=Path,
        default=None,
        metavar="FILE",
        help="the token for --tcp, else MPDB_TOKEN_FILE",
    )
    add("--make-token", type=Path, default=None, metavar="FILE", help="write a new token to a new file")
    add(
        "--dap",
        type=int,
        default=None,
        metavar="PORT",
        help="serve editors that speak the Debug Adapter Protocol, at this port of this machine",
    )
    add("--relay", action="store_true", help="serve another console over stdin and stdout (started by --ssh)")
    return parser


def _open_sources(options: argparse.Namespace) -> list[Source]:
    sources: list[Source] = [LocalSource(warn)]
    for address in options.tcp:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise remote.RemoteError(f"--tcp {address}: expected HOST:PORT, such as 10.0.0.5:40123")
    if options.tcp:
        token = read_token(options.token_file or token_path())
        sources.append(TcpSource(options.tcp, token, warn))
    lines = [f"ssh {host}" for host in options.ssh] + options.via
    if options.srun:
        lines += remote.list_srun_lines(options.srun)
    sources += [remote.RemoteSource(line, options.python, warn) for line in lines]
    return sources


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the console. Return 0, or 1 if a command failed, or 2 for bad usage."""
    options = _make_parser().parse_args(arguments)
    try:
        if options.relay:
            relay.serve(sys.stdin.buffer, sys.stdout.buffer)
            return 0
        if options.make_token is not None:
            create_token(options.make_token)
            print(f"wrote a new token to {options.make_token}")
            return 0
        registry = RankRegistry(_open_sources(options), options.job)
    except (TokenError, DirectoryRefusedError, FileExistsError, remote.RemoteError) as error:
        warn(str(error))
        return 2
    try:
        return _converse(registry, options)
    except DirectoryRefusedError as error:
        warn(str(error))
        return 2
    finally:
        registry.close()


def _converse(registry: RankRegistry, options: argparse.Namespace) -> int:
    if options.dap is not None:
        from multiprocessing_pdb.console.dap.server import serve_editors  # no console needs it

        return serve_editors(registry, options.dap, options.deadline)
    terminal = Terminal()
    shell = Shell(registry, terminal, options.deadline)
    try:
        if options.command:
            done = [shell.do(line) for line in options.command]
            return 0 if all(done) else 1
        shell.do("jobs" if options.job is None and len(registry.find_jobs()) > 1 else "ls")
        shell.run()
        return 0
    finally:
        shell.close()
