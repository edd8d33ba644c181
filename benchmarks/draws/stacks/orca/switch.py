"""Which way the parallel code goes, where there are several; one for a process."""

_CHOSEN = {"mode": ""}


def choose(mode: str) -> None:
    _CHOSEN["mode"] = mode


def using(*modes: str) -> bool:
    return _CHOSEN["mode"] in modes
