"""Other users cannot connect, malformed frames are refused, and an unused debugger costs nothing."""

import ast
import contextlib
import json
import os
import random
import re
import socket
import stat
import struct
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from debugger_site import ROOT, poll

from multiprocessing_pdb.wire import peer_credentials
from multiprocessing_pdb.wire.framing import LIMIT, Decoder, FrameError, encode
from multiprocessing_pdb.wire.handshake import Challenge, Response, TokenError, create_token, read_token
from multiprocessing_pdb.wire.runtime_directory import DirectoryRefusedError, RuntimeDirectory

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def connect(path):
    """Return a socket connected to a unix socket, bypassing the debugger's client code."""
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    raw.settimeout(20)
    raw.connect(str(path))
    return raw


def exchange(raw, payload):
    """Send bytes and return the received bytes up to the first frame or the end."""
    try:
        raw.sendall(payload)
        return raw.recv(1 << 16)
    except (BrokenPipeError, ConnectionResetError):
        return b""


def test_directory_and_sockets_are_closed_to_others(site):
    site.start_ranks(1, "work.py")
    site.await_ranks(1)
    assert stat.S_IMODE(site.runtime.stat().st_mode) == 0o700
    (name,) = site.sockets()
    assert stat.S_IMODE((site.runtime / name).stat().st_mode) == 0o600


@pytest.mark.parametrize("trap", ["symlink", "open to others", pytest.param("foreign", marks=needs_root)])
def test_an_untrusted_directory_is_refused_by_both_sides(site, trap):
    real = site.home / "real"
    real.mkdir(mode=0o700)
    if trap == "symlink":
        site.runtime.symlink_to(real)
    else:
        site.runtime.mkdir(mode=0o700)
        if trap == "foreign":
            os.chown(site.runtime, NOBODY, -1)
        else:
            site.runtime.chmod(0o755)
    (rank,) = site.start_ranks(1, "work.py")
    site.await_exit(rank)  # it reports why it does not stop, and continues
    assert "rank 0 does not stop" in site.read("rank0", "stderr")
    assert site.sockets() == []
    with pytest.raises(DirectoryRefusedError):
        RuntimeDirectory.open(site.runtime)
    assert site.run_console("ls").returncode == 2


@needs_root
def test_another_user_is_put_out_even_past_the_files_modes(site):
    site.start_ranks(1, "work.py")
    site.await_ranks(1)
    path = site.runtime / site.sockets()[0]
    for opened in (site.home, site.runtime, path):
        opened.chmod(0o777)  # as if the directory had protected nothing
    code = (
        "import os, socket, sys; os.setgroups([]); os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.settimeout(20)\n"
        "s.sendall(bytes.fromhex(sys.argv[2])); print(s.recv(100))"
    )
    request = encode({"id": 1, "do": "status"}).hex()
    command = [sys.executable, "-c", code, str(path), request]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert "b''" in done.stdout or "BrokenPipe" in done.stderr or "ConnectionReset" in done.stderr, done
    raw = connect(path)  # and this user can still connect
    assert b'"state":"stopped"' in exchange(raw, bytes.fromhex(request))
    raw.close()


@needs_root
def test_the_console_refuses_a_rank_of_another_user(site):
    site.runtime.mkdir(mode=0o700)
    code = (
        "import os, socket, sys, time\n"
        "s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); os.setgroups([]); os.setuid(65534)\n"
        "s.listen(5); print('listening', flush=True); time.sleep(600)"
    )
    path = site.runtime / "job+0+1.sock"
    foreign = site.start(sys.executable, "-c", code, path, stdout=subprocess.PIPE)
    assert foreign.stdout.readline() == b"listening\n"
    done = site.run_console("ls")
    assert "is user 65534" in done.stderr
    assert "job" not in done.stdout


def test_peer_check_compares_users(monkeypatch):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert peer_credentials.check_peer(ours) == os.getpid()
        other = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)
        with pytest.raises(peer_credentials.UnauthenticatedPeerError):
            peer_credentials.check_peer(ours)


MALFORMED = {
    "too long": struct.pack("!I", LIMIT + 1),
    "empty": struct.pack("!I", 0),
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "no json": struct.pack("!I", 4) + b"ruin",
    "no object": struct.pack("!I", 9) + b'["ls", 1]',
    "nan": struct.pack("!I", 12) + b'{"do" : NaN}',
    "deep": struct.pack("!I", 200000) + b"[" * 200000,
    "no text": struct.pack("!I", 4) + b"\xff\xfe\xfd\xfc",
}


def test_malformed_frames_are_refused_and_the_rank_stays_reachable(site):
    site.start_ranks(1, "work.py")
    site.await_ranks(1)
    path = site.runtime / site.sockets()[0]
    for name, payload in MALFORMED.items():
        raw = connect(path)
        assert exchange(raw, payload) == b"", name
        raw.close()
        with pytest.raises(FrameError):
            list(Decoder().feed(payload))
    for strange in ({"id": 1}, {"id": 1, "do": 5}, {"id": 1, "do": "line\x00"}, {"id": 1, "do": ["ls"]}):
        raw = connect(path)
        assert b"unknown request" in exchange(raw, encode(strange)), strange
        raw.close()
    for strange in ({"id": 1, "do": "hash", "begin": "x"}, {"id": 1, "do": "evaluate"}):
        raw = connect(path)
        assert b"error" in exchange(raw, encode(strange)), strange
        raw.close()
    assert site.ask("@0 p value") == "rank 0: 0\n"


def test_requests_meant_for_one_stop_do_not_reach_the_next(site):
    """A console may have sent a line when another one continues the rank; the line must not run elsewhere."""
    (rank,) = site.start_ranks(1, "conditions.py")
    site.await_ranks(1)
    raw = connect(site.runtime / site.sockets()[0])
    lines = ["import time; time.sleep(0.5)", "continue", "turn = 1000"]
    raw.sendall(b"".join(encode({"id": n, "do": "line", "text": text}) for n, text in enumerate(lines)))
    decoder, answers = Decoder(), []
    while len(answers) < 3:
        answers += decoder.feed(raw.recv(1 << 16))
    raw.close()
    assert [answer.get("end") for answer in answers] == ["ready", "resumed", None]
    assert "went on before" in answers[2]["error"]
    site.await_ranks(1)
    assert site.ask("diff turn < 1000") == "rank 0: True\n"
    assert rank.poll() is None


def test_strangers_on_tcp_do_not_keep_the_user_out(site):
    _, address = start_tcp_rank(site, site.home / "token")
    strangers = [socket.create_connection(("127.0.0.1", address.port), 20) for _ in range(80)]
    try:
        raw = connect(site.runtime / site.sockets()[0])  # at once: strangers are disconnected after seconds
        assert b'"state":"stopped"' in exchange(raw, encode({"id": 1, "do": "status"}))
        raw.close()
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_rank_that_sends_nonsense_does_not_harm_the_console(site):
    """A fake rank of the same user sends malformed frames, and text that would forge terminal content."""
    site.runtime.mkdir(mode=0o700)
    listeners = []
    answers = [b"\x00\x00\x00\x04ruin", encode({"id": 1, "label": "\x1b]0;title\x07\x1b[3A", "state": [1]})]
    for number, answer in enumerate(answers):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(site.runtime / f"job+{number}+1.sock"))
        listener.listen(5)

        def serve(listener=listener, answer=answer):
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)
                connection.recv(4096)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        listeners.append((listener, thread))
    done = site.run_console("ls")
    for listener, thread in listeners:
        thread.join(20)
        listener.close()
    assert "Traceback" not in done.stderr
    assert "not JSON" in done.stdout
    assert "\x1b" not in done.stdout


def test_no_pickle_and_no_evaluation_in_the_console():
    """Check the source: it does not even import anything that turns received bytes into code."""
    package = ROOT / "multiprocessing_pdb"
    expressions = package / "rank" / "expressions.py"
    for path in package.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            banned = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "multiprocessing.connection"}
            assert not banned & set(names), path
            called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            assert called not in ("eval", "exec", "__import__") or path == expressions, path


def test_disabled_is_a_no_op(site):
    process = site.start_python("work.py", env={"MPDB_DISABLE": "1", "RANK": "0", "WORLD_SIZE": "2"})
    site.await_exit(process)
    assert site.read(stream="stderr") == "to stderr\n"
    assert not site.runtime.exists()


UNUSED = """
import json, os, sys, threading
before = set(os.listdir("/proc/self/fd"))
from multiprocessing_pdb import MultiprocessingPdb
Tra = MultiprocessingPdb().set_trace
for _ in range(10):
    Tra(when=False)
print(json.dumps({
    "threads": threading.active_count(),
    "descriptors": len(set(os.listdir("/proc/self/fd")) - before),
    "modules": [m for m in sys.modules if m in
                ("readline", "socket", "_socket", "torch", "pdb", "pdbpp", "json.decoder.x", "asyncio",
                 "selectors", "subprocess", "multiprocessing_pdb.rank.stop", "multiprocessing_pdb.rank.server")],
}))
"""


def test_unused_it_opens_starts_and_imports_nothing(site):
    code = UNUSED.replace("import json, os, sys, threading", "import os, sys, threading, json")
    done = subprocess.run(
        [sys.executable, "-c", code], env=site.env, capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout) == {"threads": 1, "descriptors": 0, "modules": []}
    assert not site.runtime.exists()


def listening_ports(pid):
    """Return the TCP addresses that a process listens on."""
    connections = psutil.Process(pid).net_connections("inet")
    return [c.laddr for c in connections if c.status == psutil.CONN_LISTEN]


def start_tcp_rank(site, token):
    create_token(token)
    site.env["MPDB_TOKEN_FILE"] = str(token)
    process = site.start_python("tcp.py", "127.0.0.1:0", env={"RANK": "0", "MPDB_JOB": site.job})
    site.await_ranks(1)
    (address,) = listening_ports(process.pid)
    return process, address


def test_tcp_only_when_asked_and_only_there(site):
    (plain,) = site.start_ranks(1, "work.py")
    site.await_ranks(1)
    assert listening_ports(plain.pid) == []
    site.ask("c")
    _, address = start_tcp_rank(site, site.home / "token")
    assert address.ip == "127.0.0.1"


def test_tcp_needs_the_token(site):
    process, address = start_tcp_rank(site, site.home / "token")
    place = f"127.0.0.1:{address.port}"
    elsewhere = {"MPDB_DIR": str(site.home / "elsewhere")}
    options = ["--tcp", place, "--token-file"]
    done = site.run_console("ls", "@0 p secret", options=[*options, site.home / "token"], env=elsewhere)
    assert "rank 0: 42" in done.stdout
    create_token(site.home / "wrong")
    wrong = site.run_console("@0 p secret", options=[*options, site.home / "wrong"], env=elsewhere)
    assert "42" not in wrong.stdout
    assert "connection" in wrong.stderr or "token" in wrong.stderr
    (site.home / "token").chmod(0o644)
    assert site.run_console("ls", options=[*options, site.home / "token"], env=elsewhere).returncode == 2
    (site.home / "token").chmod(0o600)
    raw = socket.create_connection(("127.0.0.1", address.port), 20)
    raw.recv(4096)
    assert exchange(raw, encode({"id": 1, "do": "line", "text": "c"})) == b""
    raw.close()
    assert process.poll() is None
    assert "runs on" in site.run_console("c", options=[*options, site.home / "token"], env=elsewhere).stdout
    site.await_exit(process)


def test_a_recorded_conversation_cannot_be_replayed(site):
    _, address = start_tcp_rank(site, site.home / "token")
    proxy = socket.create_server(("127.0.0.1", 0))
    recorded = bytearray()

    def pass_on():
        console, _ = proxy.accept()
        rank = socket.create_connection(("127.0.0.1", address.port), 20)

        def answers():
            while data := rank.recv(4096):
                console.sendall(data)

        back = threading.Thread(target=answers, daemon=True)
        back.start()
        while data := console.recv(4096):
            recorded.extend(data)
            rank.sendall(data)
        rank.shutdown(socket.SHUT_RDWR)
        back.join(20)
        rank.close()
        console.close()

    thread = threading.Thread(target=pass_on, daemon=True)
    thread.start()
    options = ["--tcp", f"127.0.0.1:{proxy.getsockname()[1]}", "--token-file", site.home / "token"]
    elsewhere = {"MPDB_DIR": str(site.home / "elsewhere")}
    assert "rank 0: 42" in site.run_console("@0 p secret", options=options, env=elsewhere).stdout
    thread.join(20)
    proxy.close()
    assert len(recorded) > 200
    raw = socket.create_connection(("127.0.0.1", address.port), 20)
    assert b"challenge" in raw.recv(4096)
    assert exchange(raw, bytes(recorded)) == b""
    raw.close()


def test_seals_refuse_what_was_altered_repeated_or_reflected():
    token = bytes(range(32))
    challenge, response = Challenge(token), Response(token)
    proof, seal_rank, open_rank = challenge.verify(response.answer(challenge.request()))
    seal_console, open_console = response.verify(proof)
    first = seal_console(b"first")
    assert open_rank(first) == b"first"
    for bad in (first, seal_console(b"second")[:-1] + b"!", seal_rank(b"reflected")):
        with pytest.raises(FrameError):
            open_rank(bad)
    with pytest.raises(FrameError):
        open_console(first)
    with pytest.raises(FrameError):
        Challenge(token).verify(Response(bytes(32)).answer(Challenge(token).request()))
    with pytest.raises(FrameError):
        response.verify({"proof": "00" * 32})


def test_token_file_must_be_closed_to_others(tmp_path):
    path = tmp_path / "token"
    create_token(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(read_token(path)) == 32
    with pytest.raises(FileExistsError):
        create_token(path)
    (tmp_path / "link").symlink_to(path)
    (tmp_path / "short").write_text("00")
    (tmp_path / "short").chmod(0o600)
    path.chmod(0o640)
    for bad in (path, tmp_path / "link", tmp_path / "short", tmp_path / "missing"):
        with pytest.raises(TokenError):
            read_token(bad)


def test_a_long_runtime_path_works(site):
    site.env["MPDB_DIR"] = str(site.home / ("long" * 40))
    Path(site.env["MPDB_DIR"]).parent.mkdir(exist_ok=True)
    site.start_ranks(1, "work.py")
    site.await_ranks(1)
    assert re.search(r"rank 0: 0", site.ask("@0 p value"))


# Without the requests that change a rank when well-formed: stop, break, line, kill.
HARMLESS = ["status", "stacks", "attach", "detach", "cancel", "evaluate", "leaves", "hash", "element"]
HARMLESS += ["compare", "rows"]
HARMLESS += ["complete", "where", "frames", "variables", "inspect", "", "eof\0", None, 7, [], {"do": 1}]
STRANGE = [
    None,
    -1,
    0,
    2**70,
    1.5,
    True,
    "",
    "1",
    "number",
    "x" * 5000,
    "\x1b]0;title\x07",
    [],
    [[[]]],
    {"a": {}},
]
FIELDS = ["id", "text", "begin", "end", "parts", "path", "at", "index", "scope", "line", "request", "size"]


def make_frames(seed, count):
    """Return frames with known requests and invalid fields, some with a few bits flipped."""
    chosen = random.Random(seed)
    for _ in range(count):
        fields = {name: chosen.choice(STRANGE) for name in chosen.sample(FIELDS, chosen.randint(0, 6))}
        payload = bytearray(encode({"do": chosen.choice(HARMLESS), **fields}))
        for _ in range(chosen.choice([0, 0, 0, 1, 3])):
            payload[chosen.randrange(4, len(payload))] ^= 1 << chosen.randrange(8)
        yield bytes(payload)


def test_no_frame_costs_a_rank_its_server_or_its_result(site):
    """Send frames as a broken console may: to a running armed rank, then to the same rank when stopped."""
    go = site.home / "go"
    (rank,) = site.start_ranks(1, "steady.py", go)
    poll(lambda: list(site.runtime.glob("*.armed")), "the armed rank")
    for suffix, count in ((".control", 150), (".sock", 150)):
        if suffix == ".sock":
            site.ask("stop", "wait 1 60")
        (path,) = site.runtime.glob(f"*{suffix}")
        for payload in make_frames(suffix, count):
            assert path.exists(), site.explain()
            raw = connect(path)
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                raw.sendall(payload)
                raw.shutdown(socket.SHUT_WR)
                while raw.recv(1 << 16):  # until the rank has ended the connection
                    pass
            raw.close()
        assert rank.poll() is None, site.explain()
        assert "steady.py" in site.ask("ls")
    assert site.ask("@0 p number >= 0", "c") == "rank 0: True\nrank 0: runs on\n"
    go.touch()
    site.await_exit(rank)
    assert "steps agree" in site.read("rank0")
    assert "Traceback" not in site.read("rank0", "stderr")
