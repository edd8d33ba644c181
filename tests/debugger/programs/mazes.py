"""Fork a process for each run of the maze and each console of the state machine's sequences.

`python mazes.py SOCKET` imports the maze, the debugger and the console before it serves requests. A request
is a JSON datagram. Replies are JSON datagrams too: the process itself reports each prompt at which a thread
begins or ends to wait, and its result. This server reports its pid and how it ended.
"""

import atexit
import gc
import json
import os
import selectors
import signal
import socket
import sys
import threading
import traceback

import maze

import multiprocessing_pdb
from multiprocessing_pdb.console import command_line
from multiprocessing_pdb.rank import debugger, exception_hooks, monitor, server, session

IMPORTED_EARLY = exception_hooks, monitor

_CHANNEL = socket.socket(fileno=int(sys.argv[1]))
maze.KEPT.add(_CHANNEL.fileno())

# A thread in here waits at a prompt, whatever the debugger believes. The module's name makes steps pass
# over it, as over the debugger's own code.
_TELL_PROMPTS = """
def read_line(self):
    tell({"prompt": self.rank.file_stem(), "waits": True})
    try:
        return original(self)
    finally:
        tell({"prompt": self.rank.file_stem(), "waits": False})
"""


def tell(number, fact):
    """Report an event of a process."""
    _CHANNEL.send(json.dumps({"number": number, **fact}).encode())


def run_program(request):
    """Play, and report the result."""
    number = request["number"]
    names = {
        "__name__": "multiprocessing_pdb.tell_prompts",
        "tell": lambda fact: tell(number, fact),
        "original": session.Session._read_line,
    }
    exec(_TELL_PROMPTS, names)
    session.Session._read_line = names["read_line"]
    if request["armed"]:
        multiprocessing_pdb.arm()

    def play():
        try:
            result = maze.play(request["ops"])
        except BaseException as error:
            result = repr(error)
        tell(number, {"result": result})

    if request["in_thread"]:
        thread = threading.Thread(target=play, name="program")
        thread.start()
        thread.join()
    else:
        play()


def run_console(request):
    """Execute the typed lines, and report an error that a user would see as a traceback."""
    text = "".join(f"{line}\n" for line in request["lines"]).encode()
    ours, theirs = os.pipe()
    os.write(theirs, text)
    os.close(theirs)
    os.dup2(ours, 0)
    try:
        command_line.main(["--deadline", "0.1"])
    except Exception:
        tell(request["number"], {"error": traceback.format_exc()})


def exit_at_once():
    """End like a program, with threads and exit handlers, but without freeing modules (ten times slower)."""
    threading._shutdown()
    atexit._run_exitfuncs()
    os._exit(0)


def begin_process(request):
    """Set up this forked process like a freshly started one."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(request["environment"])
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, stream in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, stream)


def serve():
    """Serve until the client is gone. Returns the request in each forked process."""
    pids = set()
    with selectors.DefaultSelector() as selector:
        selector.register(_CHANNEL, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is not None:
                    number, pid = key.data
                    selector.unregister(key.fileobj)
                    os.close(key.fileobj)
                    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    pids.remove(pid)
                    tell(number, {"status": status})
                    continue
                request = json.loads(_CHANNEL.recv(1 << 16) or "null")
                if request is None:
                    for pid in pids:
                        os.killpg(pid, signal.SIGKILL)
                    os._exit(0)
                pid = os.fork()
                if pid == 0:
                    return request
                os.setpgid(pid, pid)
                pids.add(pid)
                tell(request["number"], {"pid": pid})
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (request["number"], pid))


def main():
    """Serve, and run the requested process."""
    server._TICK_SECONDS = 0.05  # recreates a removed socket file sooner
    debugger._load_class()
    gc.collect()
    gc.freeze()  # a collection in a fork would copy all pages
    request = serve()
    begin_process(request)
    {"program": run_program, "console": run_console}[request["do"]](request)
    if not request["frees"]:
        exit_at_once()


if __name__ == "__main__":
    main()
