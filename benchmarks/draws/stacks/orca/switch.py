"""The selected variant of the parallel code; one per process."""

_CHOSEN = {"mode": ""}


def choose(mode: str) -> None:
    _CHOSEN["mode"] = mode


def using(*modes: str) -> bool:
    return _CHOSEN["mode"] in modes
