"""The page that `moeverify report --serve` serves: it follows the file of the run, and answers this machine alone."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from moeverify.cli import keeper
from moeverify.errors import FormatError
from moeverify.report import live
from moeverify.report.formats.json import RUN_FILE, read_run, write
from moeverify.results.run import Event, RunResult


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], int]]:
    """Return a function that serves a run and returns the port."""
    servers: list[live._Server] = []
    made = live._Server.__init__

    def remember(server: live._Server, *arguments: Any) -> None:
        made(server, *arguments)
        servers.append(server)

    monkeypatch.setattr(live._Server, "__init__", remember)

    def do(run: Path) -> int:
        shown, is_shown = [], threading.Event()

        def show(address: str) -> None:
            shown.append(address)
            is_shown.set()

        threading.Thread(target=live.serve_page, args=(run, 0, show), daemon=True).start()
        assert is_shown.wait(60)
        return int(shown[0].rsplit(":", 1)[1].strip("/"))

    yield do
    for server in servers:
        server.shutdown()


def ask(port: int, address: str, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", address, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def make_running(make_run: Any, *waiting: str) -> RunResult:
    (first, *_) = make_run().cases
    run = RunResult(verdict="error" if waiting else "pass", environment={}, waiting=waiting, cases=(first,))
    assert first.verdict == "pass"
    return run


def test_a_page_follows_the_file_of_its_run(serve: Any, make_run: Any, tmp_path: Path) -> None:
    write(make_running(make_run, "cp", "pp"), tmp_path / RUN_FILE)
    port = serve(tmp_path)
    (_, version), (status, page) = ask(port, "/version"), ask(port, "/")
    assert status == 200
    assert "1 of 3 cases finished, now cp" in page
    assert "moeverify: running" in page
    assert ask(port, "/version")[1] == version
    write(make_running(make_run), tmp_path / RUN_FILE)
    assert ask(port, "/version")[1] != version
    page = ask(port, "/")[1]
    assert "The run has ended." in page
    assert "moeverify: pass" in page
    (tmp_path / RUN_FILE).write_text("{")
    assert "moeverify: pass" in ask(port, "/")[1], "a file that cannot be read replaces no page"


def test_another_host_and_another_address_are_refused(serve: Any, make_run: Any, tmp_path: Path) -> None:
    write(make_running(make_run), tmp_path / RUN_FILE)
    port = serve(tmp_path)
    assert ask(port, "/", Host=f"localhost:{port}")[0] == 200
    assert ask(port, "/", Host="attacker.example")[0] == 403
    assert ask(port, "/operators/ddp")[0] == 404
    assert ask(port, "/operators/..%2F..%2Fetc%2Fpasswd")[0] == 404


def test_a_process_of_another_user_is_refused(
    serve: Any, make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(make_running(make_run), tmp_path / RUN_FILE)

    def refuse(_: object) -> None:
        raise live.StreamError("a process of user 1 was refused")

    port = serve(tmp_path)
    monkeypatch.setattr(live, "check_user", refuse)
    with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
        ask(port, "/")


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="holds no"):
        live.LivePage(tmp_path)


def test_the_page_takes_over_a_newer_state(
    serve: Any, make_run: Any, tmp_path: Path, browser: ModuleType
) -> None:
    write(make_running(make_run, "cp"), tmp_path / RUN_FILE)
    port = serve(tmp_path)
    loads = []

    def count(page: live.LivePage) -> str:  # the run ends after the page has been loaded
        loads.append(page)
        if len(loads) == 2:
            write(make_running(make_run), tmp_path / RUN_FILE)
        return real(page)

    real = live.LivePage.find_version
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live.LivePage, "find_version", count)
        done = browser.visit(f"http://127.0.0.1:{port}/", "--virtual-time-budget=9000", "--dump-dom")
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    assert "The run has ended." in done.stdout
    assert "<title>moeverify: pass</title>" in done.stdout


def test_a_run_writes_its_results_while_it_goes_on(
    make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "_BETWEEN", 0.0)
    monkeypatch.setattr(keeper, "_SHARE", 0)
    (first, *_) = make_run().cases
    cases: Any = [SimpleNamespace(name=name) for name in ("pp", first.name, "tp")]
    seen: list[Event] = []
    on_event = keeper.Keeper().watch(seen.append, cases, tmp_path / RUN_FILE)
    on_event(Event(kind="case-start", case=first.name))
    run = read_run(tmp_path)
    assert (run.verdict, run.cases, run.waiting) == ("error", (), (first.name, "pp", "tp"))
    on_event(Event(kind="case-end", case=first.name, result=first))
    run = read_run(tmp_path)
    assert ([case.name for case in run.cases], run.waiting) == ([first.name], ("pp", "tp"))
    assert len(seen) == 2
