"""Forks a process for each run of the maze, and for each console, of the state machine's sequences.

`python mazes.py SOCKET` has imported the maze, the debugger and the console when it is asked for the first. A request
is a datagram of JSON. What becomes of a process is told in the same way: by the process itself each prompt at which a
thread begins and ends to wait, and the result; by this server its pid, and how it ended.
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

# Whatever the debugger itself believes, a thread in here waits at a prompt. The name of the module makes steps pass
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
    """Send what has become of a process."""
    _CHANNEL.send(json.dumps({"number": number, **fact}).encode())


def run_program(request):
    """Play, and tell what was computed."""
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
    """Do what is typed, and tell of an error that a user would see as a traceback."""
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
    """End as a program does as far as threads and exit handlers go; freeing all modules takes ten times as long."""
    threading._shutdown()
    atexit._run_exitfuncs()
    os._exit(0)


def begin_process(request):
    """Make this forked process one that was started on its own."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(request["environment"])
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, stream in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, stream)


def serve():
    """Fork until there is nobody to ask; return the request in a process that was asked for."""
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
    """Serve, and be what was asked for."""
    server._TICK_SECONDS = 0.05  # a socket file that was removed is made again sooner
    debugger._load_class()
    gc.collect()
    gc.freeze()  # a collection in a forked process would write to all pages, and copy them
    request = serve()
    begin_process(request)
    {"program": run_program, "console": run_console}[request["do"]](request)
    if not request["frees"]:
        exit_at_once()


if __name__ == "__main__":
    main()
