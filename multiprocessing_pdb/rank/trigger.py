"""MultiprocessingPdb: decides in less than a microsecond that a call of Tra() does not stop."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from types import FrameType
from typing import Any

from multiprocessing_pdb.rank.compiled_code import end_compilation, may_stop
from multiprocessing_pdb.rank.descriptors import RoomForDescriptors


def load_stop() -> Any:
    """Return the module that stops threads, or None after a line on stderr: the program must go on."""
    end_compilation()
    try:
        with RoomForDescriptors():
            from multiprocessing_pdb.rank import stop
    except Exception as error:  # such as no descriptor for an import
        if sys.stderr is not None:
            sys.stderr.write(f"multiprocessing_pdb: no stop, {type(error).__name__}: {error}\n")
        return None
    return stop


def _on_nan(model: Any) -> Any:
    """Stop at the model's first non-finite value, as multiprocessing_pdb.on_nan() does."""
    from multiprocessing_pdb.rank.nan_hooks import watch_model

    return watch_model(model)


class MultiprocessingPdb:
    """Debugger for one of many processes.

        Tra = MultiprocessingPdb().set_trace

    With `tcp` ("host:port"), a stopped rank also listens on TCP for consoles that know the token.
    `coordinates`, such as {"tp": 1}, is the position of this rank for programs without a DeviceMesh. A
    callable is called at the stop. `arm` raises the timeouts of this process's collectives while another
    rank is stopped, as `arm()` does.
    """

    def __init__(
        self,
        *,
        tcp: str | None = None,
        coordinates: Mapping[str, int] | Callable[[], Mapping[str, int]] | None = None,
        arm: bool = False,
    ) -> None:
        self._tcp = tcp
        self._coordinates = coordinates
        self._hits: dict[tuple[str, int], int] = {}
        self._done: set[tuple[str, int]] = set()
        if arm:
            from multiprocessing_pdb.rank.monitor import arm as start

            start()

    def set_trace(
        self,
        *,
        ranks: int | Collection[int] | None = None,
        when: Any = True,
        skip: int = 0,
        every: int = 1,
        once: bool = False,
        header: str | None = None,
    ) -> None:
        """Stop this rank at the next line, if it is one of `ranks` and `when` holds. No collective.

        `when` is a value, a tensor of one element, or a callable. At each call site, the first `skip` hits
        are ignored, and then every `every`-th hit stops. `once` stops a single time. The console shows
        `header`.
        """
        if when is False or not may_stop() or (ranks is not None and not self._is_among(ranks)):
            return
        if not (when() if callable(when) else when):
            return
        frame = sys._getframe(1)
        if self._is_due(frame, skip, every, once):
            self._stop(frame, header)

    set_trace.on_nan = _on_nan  # type: ignore[attr-defined]  # so that users can write Tra.on_nan(model)

    @staticmethod
    def _is_among(ranks: int | Collection[int]) -> bool:
        from multiprocessing_pdb.rank.identify import identify

        number = identify().number
        return number is not None and (number == ranks if isinstance(ranks, int) else number in ranks)

    def _is_due(self, frame: FrameType, skip: int, every: int, once: bool) -> bool:
        place = (frame.f_code.co_filename, frame.f_lineno)
        if place in self._done:
            return False
        hits = self._hits[place] = self._hits.get(place, 0) + 1
        if hits <= skip or (hits - skip) % max(1, every) != 0:
            return False
        if once:
            self._done.add(place)
        return True

    def _stop(self, frame: FrameType, header: str | None) -> None:
        module = load_stop()
        if module is not None:
            coordinates = self._coordinates() if callable(self._coordinates) else self._coordinates
            module.stop_at(frame, module.Stop(header or "Tra()", self._tcp, coordinates))
