"""Order of computation without recursion: chains of thousands of operators exceed Python's recursion limit."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import TypeVar

Node = TypeVar("Node")


def list_sources_first(
    start: Node, sources: Callable[[Node], Iterable[Node]], done: Container[Node]
) -> list[Node]:
    """Return `start` and everything that it depends on and that is not in `done`, each after its sources.

    Example: `list_sources_first(3, lambda n: [n - 1] if n else [], {0})` is `[1, 2, 3]`.
    """
    if start in done:
        return []  # as for most values that are looked up
    order: list[Node] = []
    seen: set[Node] = set()
    waiting = [(start, False)]
    while waiting:
        node, is_ready = waiting.pop()
        if is_ready:
            order.append(node)
        elif node not in seen and node not in done:
            seen.add(node)
            waiting.append((node, True))
            waiting += ((source, False) for source in sources(node))
    return order
