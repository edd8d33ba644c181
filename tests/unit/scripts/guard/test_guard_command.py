"""A guarded command that cannot write its findings to disk: it shows them, and the command continues."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

from moeverify.results.finding import Finding
from moeverify.results.script import CallFacts, CallRule, ScriptCheck
from moeverify.scripts.guard.command import GuardedCommand
from moeverify.scripts.guard.exchange import FINDINGS
from moeverify.scripts.guard.settings import GuardSettings


class OneFinding:
    """A judge that has one finding on its first call."""

    def __init__(self) -> None:
        facts = CallFacts(rule=CallRule.KEPT)
        self._left = [
            Finding(
                check=ScriptCheck.CALLS,
                tensor="kept",
                step=0,
                rank=0,
                ranks=(0,),
                error=1.0,
                bound=0.0,
                facts=facts,
            )
        ]

    def look(self, *, is_over: bool = False) -> list[Finding]:
        found, self._left = self._left, []
        return found

    def remove(self) -> None:
        pass


def test_a_full_disk_keeps_no_finding_and_ends_no_command(tmp_path: Path) -> None:
    (tmp_path / FINDINGS).symlink_to("/dev/full")
    shown: list[Finding] = []
    guarded = GuardedCommand(GuardSettings(out=tmp_path), shown.append, stops=False)
    guarded.judge = OneFinding()  # type: ignore[assignment]
    program = "import time; time.sleep(1.5); raise SystemExit(7)"
    assert guarded.run([sys.executable, "-c", program]) == 7
    assert len(shown) == 1
    assert guarded.refused is not None
    assert guarded.refused.errno == errno.ENOSPC
