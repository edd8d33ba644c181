"""Events after which a rank must stay reachable: interruptions, ends of stepped threads, failed requests."""

import socket
import sys
import threading
import types

import pytest

from multiprocessing_pdb.rank import server as server_module
from multiprocessing_pdb.rank.interruption import Interrupted, Interruption
from multiprocessing_pdb.rank.server import Server
from multiprocessing_pdb.rank.session import Session
from multiprocessing_pdb.rank.stop import _ThreadEnd
from multiprocessing_pdb.wire.framing import Decoder, encode

PATIENCE = 60.0


def called():
    return 1


def call_traced(count, then):
    """Call a function `count` times while tracing, as a thread that is being stopped does."""

    def work():
        sys.settrace(lambda frame, event, argument: None)
        for _ in range(count):
            called()
        sys.settrace(None)
        then()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def call_interruptibly(function):
    """Start a call in a thread. Returns its interruption, the thread, and the list that gets its outcome."""
    outcome, made, ready = [], [], threading.Event()

    def work():
        interruption = Interruption(threading.current_thread())
        made.append(interruption)
        interruption.allow()
        ready.set()
        try:
            outcome.append(interruption.call(function))
        except Interrupted:
            outcome.append("interrupted")

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert ready.wait(PATIENCE)
    return made[0], thread, outcome


def test_a_thread_that_the_interrupted_one_waits_for_goes_on():
    gate = threading.Lock()
    gate.acquire()
    interruption, waiter, outcome = call_interruptibly(gate.acquire)
    assert interruption.send()
    call_traced(20_000, gate.release)
    waiter.join(PATIENCE)
    assert outcome, "on CPython 3.11 no traced thread runs while an exception is pending"


def test_an_interruption_that_is_withdrawn_leaves_nothing_pending():
    gate = threading.Lock()
    gate.acquire()
    interruption, waiter, _ = call_interruptibly(gate.acquire)
    assert interruption.send()
    gate.release()
    waiter.join(PATIENCE)
    stepped = call_traced(1_000, lambda: None)
    stepped.join(PATIENCE)
    assert not stepped.is_alive()


def test_a_loop_is_interrupted():
    def spin():
        while True:
            pass

    interruption, thread, outcome = call_interruptibly(spin)
    assert interruption.send()
    thread.join(PATIENCE)
    assert outcome == ["interrupted"]
    assert not interruption.send(), "it accepts nothing once it is over"


@pytest.mark.parametrize("work", [lambda: None, lambda: sum(range(500))])
def test_none_arrives_after_the_call(work):
    ended, escaped, made = threading.Event(), [], []

    def repeat():
        interruption = Interruption(threading.current_thread())
        made.append(interruption)
        try:
            for _ in range(2_000):
                try:
                    interruption.call(work)
                except Interrupted:
                    continue
        except Interrupted as error:  # between two calls
            escaped.append(error)
        finally:
            ended.set()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    while not ended.wait(0.0005):
        for interruption in made:
            interruption.send()
    assert not escaped


def test_a_step_past_the_end_of_a_thread_does_not_stop_in_what_closes_its_endpoint():
    traced = []

    class Session:
        def end(self):
            traced.append(sys.gettrace())

    ends = [_ThreadEnd(Session())]
    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: None)
    try:
        ends.clear()
    finally:
        sys.settrace(before)
    assert traced == [None], "a stop there would hold the endpoint's lock, and its server would wait for it"


def test_a_request_that_fails_leaves_the_server_alive(tmp_path):
    listener, client = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "socket"))
    listener.listen()
    server = Server(
        [listener], lambda server, number, frame: frame["nothing"], lambda number: None, lambda: None
    )
    server.start()
    try:
        client.settimeout(PATIENCE)
        client.connect(str(tmp_path / "socket"))
        for number in (1, 2):
            client.sendall(encode({"id": number, "do": "stacks"}))
            (answer,) = Decoder().feed(client.recv(4096))
            assert answer == {"id": number, "error": "KeyError: 'nothing'"}
    finally:
        client.close()
        server.shut(1.0)


def test_a_request_that_came_while_its_stop_ended_is_not_done_at_the_next_one():
    class Prompt:
        prompt = "(Pdb) "
        curframe = None

        def paint(self, colors):
            pass

    refused = []
    earlier = types.SimpleNamespace(send=lambda connection, frame: refused.append(frame["error"]))
    later = types.SimpleNamespace()
    session = Session()
    session.debuggers.append(Prompt())
    session._is_fresh = False
    session._endpoint = types.SimpleNamespace(server=later)
    session.stdout.write("(Pdb) ")
    for server, text in ((earlier, "continue"), (later, "where")):
        session._state = "busy"  # as close() sees it when the request arrives meanwhile
        session.receive(server, 1, {"do": "line", "text": text})
    assert session._read_line() == "where\n"
    assert refused == ["the rank went on before it came to this"]


def test_consoles_learn_that_the_server_has_ended_however_it_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "_TICK_SECONDS", 0.02)
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    listener, client = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "socket"))
    listener.listen()
    server = Server([listener], lambda server, number, frame: None, lambda number: None, sys.exit)
    client.settimeout(PATIENCE)
    client.connect(str(tmp_path / "socket"))
    server.start()
    with client:
        assert client.recv(1) == b""
    server.join(PATIENCE)  # while its end is not reported: the next test would be blamed
    assert not server.is_alive()
