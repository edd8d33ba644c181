"""Editors: a client of the Debug Adapter Protocol sees ranks as threads, through `--dap`."""

import contextlib
import json
import os
import re
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from debugger_site import PATIENCE, PROGRAMS, poll

from multiprocessing_pdb.console.dap.stream import StreamError, check_user

WORK = PROGRAMS / "work.py"
STEADY = PROGRAMS / "steady.py"


def find_line(path, text):
    return next(at for at, line in enumerate(path.read_text().splitlines(), 1) if text in line)


class Editor:
    """An editor's side of the protocol: numbered requests, and events at any time."""

    def __init__(self, port):
        self.connection = socket.create_connection(("127.0.0.1", port))
        self.received = b""
        self.events = []
        self.answers = {}
        self.number = 0

    def _receive(self, deadline):
        left = deadline - time.monotonic()
        assert left > 0, f"nothing more came; events {self.events}"
        if not select.select([self.connection], [], [], left)[0]:
            return
        more = self.connection.recv(65536)
        assert more, "the adapter has closed the connection"
        self.received += more
        while (match := re.match(rb"Content-Length: (\d+)\r\n\r\n", self.received)) and len(
            self.received
        ) >= match.end() + int(match[1]):
            end = match.end() + int(match[1])
            message = json.loads(self.received[match.end() : end])
            self.received = self.received[end:]
            if message["type"] == "event":
                self.events.append(message)
            else:
                self.answers[message["request_seq"]] = message

    def try_request(self, command, **arguments):
        """Send a request and return the whole response."""
        self.number += 1
        message = {"seq": self.number, "type": "request", "command": command, "arguments": arguments}
        payload = json.dumps(message).encode()
        self.connection.sendall(b"Content-Length: %d\r\n\r\n" % len(payload) + payload)
        deadline = time.monotonic() + PATIENCE
        while self.number not in self.answers:
            self._receive(deadline)
        answer = self.answers.pop(self.number)
        assert answer["command"] == command
        return answer

    def request(self, command, **arguments):
        """Send a request and return the body of its response, which must be a success."""
        answer = self.try_request(command, **arguments)
        assert answer["success"], answer
        return answer["body"]

    def await_event(self, event, **wanted):
        """Return the body of the next event with these values; earlier events of other kinds are kept."""
        deadline = time.monotonic() + PATIENCE
        while True:
            for at, found in enumerate(self.events):
                body = found["body"]
                if found["event"] == event and all(body.get(key) == value for key, value in wanted.items()):
                    del self.events[at]
                    return body
            self._receive(deadline)

    def begin(self, breakpoints=(), configuration=None):
        """Start a session as editors do, and return (path, line, condition) of each breakpoint."""
        configuration = configuration or {"type": "test"}
        assert self.request("initialize", adapterID=configuration["type"])["supportsConfigurationDoneRequest"]
        self.await_event("initialized")
        self.request("attach", **configuration)
        shown = [self.set_breakpoints(path, {line: condition}) for path, line, condition in breakpoints]
        self.request("configurationDone")
        return shown

    def set_breakpoints(self, path, lines):
        wanted = [{"line": line, "condition": condition} for line, condition in lines.items()]
        return self.request("setBreakpoints", source={"path": str(path)}, breakpoints=wanted)["breakpoints"]

    def find_top(self, thread):
        return self.request("stackTrace", threadId=thread, startFrame=0, levels=1)["stackFrames"][0]

    def evaluate(self, thread, text, context="hover"):
        found = self.request(
            "evaluate", expression=text, frameId=self.find_top(thread)["id"], context=context
        )
        return found["result"]

    def close(self):
        self.connection.close()


def start_adapter(site):
    adapter = site.start(sys.executable, "-m", "multiprocessing_pdb", site.job, "--dap", "0", name="adapter")
    pattern = re.compile(r"127\.0\.0\.1:(\d+)")
    found = poll(lambda: pattern.search(site.read("adapter", "stderr")), "the adapter's line")
    return adapter, int(found[1])


def test_an_editor_debugs_two_ranks(site):
    ranks = site.start_ranks(2, "work.py")
    site.await_ranks(2)
    _, port = start_adapter(site)
    last = find_line(WORK, 'print("total"')
    with contextlib.closing(Editor(port)) as editor:
        ((shown,),) = editor.begin([(WORK, last, "")])
        assert shown["verified"]
        for thread in (1, 2):
            assert editor.await_event("stopped", threadId=thread)["description"] == "at work"
        assert editor.request("threads")["threads"] == [
            {"id": 1, "name": "rank 0"},
            {"id": 2, "name": "rank 1"},
        ]
        frames = editor.request("stackTrace", threadId=2)["stackFrames"]
        assert [frame["name"] for frame in frames] == ["work", "<module>"]
        assert frames[0]["source"]["path"] == str(WORK)
        assert frames[0]["line"] == find_line(WORK, "total = value + 1")
        scopes = editor.request("scopes", frameId=frames[0]["id"])["scopes"]
        found = editor.request("variables", variablesReference=scopes[0]["variablesReference"])["variables"]
        assert {v["name"]: v["value"] for v in found} == {"rank": "1", "special": "'odd'", "value": "10"}
        outer = editor.request("scopes", frameId=frames[1]["id"])["scopes"]
        names = editor.request("variables", variablesReference=outer[0]["variablesReference"])["variables"]
        assert "work" in [variable["name"] for variable in names]

        assert editor.evaluate(2, "value + 5") == "15"
        assert editor.evaluate(2, "!value = 70", context="repl") == ""
        editor.request("next", threadId=2)
        editor.await_event("stopped", threadId=2, reason="step")
        assert editor.evaluate(2, "total") == "71"
        nested = editor.request(
            "evaluate", expression="{'a': [total, 2]}", frameId=editor.find_top(2)["id"], context="watch"
        )
        (item,) = editor.request("variables", variablesReference=nested["variablesReference"])["variables"]
        (first, _) = editor.request("variables", variablesReference=item["variablesReference"])["variables"]
        assert (item["name"], first["name"], first["value"]) == ("'a'", "[0]", "71")

        for thread in (2, 1):
            editor.request("continue", threadId=thread)
            editor.await_event("stopped", threadId=thread, reason="breakpoint")
            assert editor.find_top(thread)["line"] == last
        editor.request("disconnect")  # removes the breakpoints
    assert site.ask("ls").count("work.py") == 2
    assert site.ask('@all p __import__("bdb").Breakpoint.bplist') == "ranks 0-1: {}\n"
    assert site.ask("c") == "ranks 0-1: runs on\n"
    for rank in ranks:
        site.await_exit(rank)
    assert "total 2 even" in site.read("rank0")
    assert "total 142 odd" in site.read("rank1")


def test_the_configuration_of_the_page_attaches_as_vs_code_does(site):
    """VS Code sends the entry of launch.json as the arguments of `attach`, to the port of its `debugServer`."""
    page = (Path(__file__).parents[2] / "docs" / "debugging.md").read_text()
    configuration = json.loads(re.search(r"```json\n(\{.*?debugServer.*?\})\n```", page, re.DOTALL)[1])
    assert configuration["request"] == "attach"
    ranks = site.start_ranks(2, "work.py")
    site.await_ranks(2)
    _, port = start_adapter(site)
    configuration["debugServer"] = port
    with contextlib.closing(Editor(port)) as editor:
        line = find_line(WORK, 'print("total"')
        ((shown,),) = editor.begin([(WORK, line, "")], {**configuration, "__sessionId": "1"})
        assert shown["verified"]
        for thread in (1, 2):
            editor.await_event("stopped", threadId=thread)
        assert editor.evaluate(2, "value") == "10"
        editor.request("disconnect")
    assert site.ask("c") == "ranks 0-1: runs on\n"
    for rank in ranks:
        site.await_exit(rank)


def test_an_editor_stops_ranks_that_run_and_leaves_them_running(site):
    go = site.home / "go"
    ranks = site.start_ranks(2, "steady.py", go)
    poll(lambda: len(list(site.runtime.glob("*.armed"))) == 2, "armed ranks")
    _, port = start_adapter(site)
    line = find_line(STEADY, "return loss")
    with contextlib.closing(Editor(port)) as editor:
        editor.begin()
        assert len(editor.request("threads")["threads"]) == 2
        refused = editor.try_request("stackTrace", threadId=1)
        assert not refused["success"]
        assert "runs" in refused["message"]
        editor.request("pause", threadId=1)
        editor.await_event("stopped", threadId=1, reason="pause")
        assert editor.evaluate(1, "number > 0") == "True"
        assert editor.evaluate(1, "n", context="repl") == ""  # typed, not requested by a button
        editor.await_event("continued", threadId=1)
        editor.await_event("stopped", threadId=1, reason="step")
        assert not editor.try_request("evaluate", expression="missing", frameId=editor.find_top(1)["id"])[
            "success"
        ]
        (shown,) = editor.set_breakpoints(STEADY, {line: "number % 7 == 3"})
        assert shown["verified"]
        editor.request("continue", threadId=1)
        for thread in (1, 2):  # the second one was never stopped before
            editor.await_event("stopped", threadId=thread)
            assert editor.evaluate(thread, "number % 7") == "3"
        assert "not supported" in editor.try_request("restart")["message"]
        editor.set_breakpoints(STEADY, {})
        for thread in (1, 2):
            editor.request("continue", threadId=thread)
        assert "no rank is thread 77" in editor.try_request("pause", threadId=77)["message"]
    go.touch()
    for rank in ranks:
        site.await_exit(rank)


def test_only_editors_of_this_user_get_in(site, tmp_path):
    adapter, port = start_adapter(site)
    with socket.create_connection(("127.0.0.1", port)) as browser:
        browser.sendall(b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}")
        assert browser.recv(100) == b""
    if os.geteuid() == 0:
        code = (
            "import os, socket, sys; os.setgroups([]); os.setuid(65534)\n"
            f"s = socket.socket(); s.connect(('127.0.0.1', {port}))\n"
            "if sys.argv[1] == 'waits': print(s.recv(9))\n"
            "else: s.sendall(b'Content-Length: 2\\r\\n\\r\\n{}')\n"  # and closes at once
        )
        for way in ("waits", "closes"):
            other = subprocess.run(
                [sys.executable, "-c", code, way],
                capture_output=True,
                text=True,
                check=False,
                timeout=PATIENCE,
            )
            assert (other.returncode, other.stdout) == (0, "b''\n" if way == "waits" else ""), other.stderr
        poll(lambda: site.read("adapter", "stderr").count("was refused") == 2, "both are refused")
        assert "of user 65534 was refused" in site.read("adapter", "stderr")
    with contextlib.closing(Editor(port)) as editor:
        editor.begin()
        assert editor.request("threads")["threads"] == []
        table = tmp_path / "tcp"
        head, row = "sl local_address rem_address", "0: {} {} {} 0:0 0:0 0 {} 0 {}"
        server, client = editor.connection.getpeername(), editor.connection.getsockname()
        ends = [f"0100007F:{end[1]:04X}" for end in (server, client)]
        own = os.geteuid()
        refused = [
            ([head], "does not name"),
            ([head, row.format(*ends, "01", own + 1, 7)], "was refused"),
            ([head, row.format(*ends, "06", own, 0)], "does not name"),  # closed: the kernel reports root
            ([head, row.format(*ends, "01", own, 0)], "does not name"),
            ([head, row.format(*reversed(ends), "01", own, 7)], "does not name"),
        ]
        for rows, words in refused:
            table.write_text("\n".join(rows))
            with pytest.raises(StreamError, match=words):
                check_user(editor.connection, table)
        table.write_text("\n".join([head, row.format(*ends, "01", own, 7)]))
        check_user(editor.connection, table)
        assert adapter.poll() is None
