"""tcp.py HOST:PORT: stop, and also listen on TCP."""

import sys

from multiprocessing_pdb import MultiprocessingPdb

Tra = MultiprocessingPdb(tcp=sys.argv[1]).set_trace


def work():
    secret = 42
    Tra()
    return secret


work()
