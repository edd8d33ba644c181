"""A server of the page of a kept run, for `moeverify report --serve`: the page follows the run while it goes on."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from moeverify.errors import FormatError
from moeverify.report import operator_page
from moeverify.report.formats.html import format_page
from moeverify.report.formats.json import find_run_file, read_run
from moeverify.report.next_steps import Kept
from moeverify.report.operator_file import find_table, read
from multiprocessing_pdb.console.dap.stream import StreamError, check_user

_OPERATORS = "/operators/"


class LivePage:
    """The page of a run, rendered again when the file of the run has changed.

    Raises: FormatError if the file cannot be read at first; later the last page stays.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._run = read_run(path)
        self._version = self._page = ""

    def find_version(self) -> str:
        """Return a text that changes with the file of the run."""
        try:
            status = find_run_file(self._path).stat()
        except OSError:
            return self._version
        return f"{status.st_mtime_ns} {status.st_ino}"

    def format(self) -> str:
        """Return the page as HTML."""
        with self._lock:  # pictures are drawn by one thread at a time
            version = self.find_version()
            if version != self._version:
                try:
                    self._run = read_run(self._path)
                except FormatError:
                    if self._page:
                        return self._page
                operators = {
                    case.name: f"{_OPERATORS[1:]}{case.name}"
                    for case in self._run.cases
                    if find_table(case, self._path) is not None
                }
                kept = Kept.at(self._path)
                self._page = format_page(self._run, operators, kept=kept, version=version)
                self._version = version
            return self._page

    def format_operators(self, name: str) -> str | None:
        """Return the page of the operators of a case, or None without such a case."""
        with self._lock:
            tables = (find_table(case, self._path) for case in self._run.cases if case.name == name)
            table = next(tables, None)
            return None if table is None else operator_page.format_page(read(table))


class _Handler(BaseHTTPRequestHandler):
    """Answers three kinds of addresses: the page, its version, and the operators of a case."""

    server: _Server

    def do_GET(self) -> None:
        """Answer a request of a browser that names this machine; another name may belong to a foreign page."""
        address = unquote(urlsplit(self.path).path)
        if self.headers.get("Host") not in self.server.hosts:
            self._answer(HTTPStatus.FORBIDDEN, "this host is not served", "text/plain")
        elif address == "/":
            self._answer(HTTPStatus.OK, self.server.page.format(), "text/html")
        elif address == "/version":
            self._answer(HTTPStatus.OK, self.server.page.find_version(), "text/plain")
        else:
            name = address.removeprefix(_OPERATORS) if address.startswith(_OPERATORS) else ""
            try:
                found = self.server.page.format_operators(name)
            except FormatError as error:
                self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, str(error), "text/plain")
                return
            if found is None:
                self._answer(HTTPStatus.NOT_FOUND, "no such page", "text/plain")
            else:
                self._answer(HTTPStatus.OK, found, "text/html")

    def _answer(self, status: HTTPStatus, text: str, kind: str) -> None:
        raw = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(raw)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        """Print nothing: the terminal belongs to the command."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, page: LivePage, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.page = page
        self.hosts = [f"{host}:{self.server_address[1]}" for host in ("127.0.0.1", "localhost")]

    def verify_request(self, request: object, _: object) -> bool:
        """Return whether a process of this user asks."""
        assert isinstance(request, socket.socket)
        try:
            check_user(request)
        except StreamError:
            return False
        return True


def serve_page(path: Path, port: int, show: Callable[[str], None]) -> None:
    """Serve the page of a run to this user on this machine until interrupted; `show` receives the address.

    Raises: FormatError if there is no run; OSError when the port is taken.
    """
    page = LivePage(path)
    with _Server(page, port) as server:
        place = server.server_address[1]
        show(f"http://127.0.0.1:{place}/")
        server.serve_forever()
