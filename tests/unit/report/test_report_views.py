"""The smaller views: numbers, progress, mesh, problems, probes, goldens, catalog."""

from __future__ import annotations

import io
import math
import re
import threading
from typing import Any

import pytest
from rich.console import Console

from moeverify.errors import CaseError, FormatError, Problem
from moeverify.report import progress as progress_module
from moeverify.report.case_list import render_catalog
from moeverify.report.console import LOG_WIDTH, open_console
from moeverify.report.goldens import is_stale, render_goldens
from moeverify.report.mesh import render
from moeverify.report.numbers import excess, format_number, format_range, format_seconds
from moeverify.report.probes import render_probes
from moeverify.report.problems import render_error
from moeverify.report.progress import LineProgress, LiveProgress, Progress, open_progress, show_work
from moeverify.report.sanitize import clean, elide
from moeverify.results.golden import GoldenRow, GoldenState
from moeverify.results.listed import CheckedCase
from moeverify.results.mesh import MeshPicture, RankPlace
from moeverify.results.probe import ProbeRow
from moeverify.results.run import Event


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (3.14e-15, "3.1e-15"),
        (1e-10, "1e-10"),
        (0.25, "0.25"),
        (6.6e10, "6.6e10"),
        (1e100, "1e100"),
        (9999.0, "9999"),
        (-2.5e-7, "-2.5e-07"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_format_number(value: float, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("error", "bound", "times"),
    [
        (2.0, 1.0, 2.0),
        (0.0, 0.0, 0.0),
        (1e-17, 0.0, math.inf),
        (math.nan, 1.0, math.inf),
        (math.inf, 1.0, math.inf),
    ],
)
def test_excess(error: float, bound: float, times: float) -> None:
    assert excess(error, bound) == times


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([1, 0], "0, 1"),
        ([0, 1, 2, 3, 6], "0-3, 6"),
        ([0, 2, 4, 6], "0-6 by 2"),
        ([0, 2, 4], "0, 2, 4"),
        ([0, 1, 2, 13, 14, 15], "0-2, 13-15"),
    ],
)
def test_format_range(numbers: list[int], text: str) -> None:
    assert format_range(numbers) == text


def test_format_seconds() -> None:
    assert [format_seconds(s) for s in (0.04, 99.94, 99.96, 125.4, 3720)] == [
        "0.0 s",
        "99.9 s",
        "1 min 40 s",
        "2 min 05 s",
        "1 h 02 min",
    ]


def test_clean_leaves_no_character_that_changes_the_terminal_or_the_order_of_text() -> None:
    assert clean("\x1b[2Jname\u202e\x9b of\u2066\r\n a\ttensor") == "name of\n a\ttensor"


def test_elide_keeps_both_ends() -> None:
    assert elide("blocks.1.moe.experts.12.up.weight", 20) == "blocks.1...up.weight"
    assert elide("short", 5) == "short"


def test_console_of_a_log_has_a_width_of_its_own() -> None:
    assert open_console(io.StringIO()).width == LOG_WIDTH
    assert open_console(io.StringIO(), width=70).width == 70


def test_progress_in_a_log_is_a_line_an_event(make_case: Any, print_at: Any) -> None:
    events = [
        Event(kind="launch", num_total=2, num_ranks=4),
        Event(kind="golden", recipes=("tiny",)),
        Event(kind="case-start", case="stress [a]"),
        Event(kind="case-start", case="a", num_total=2),
        Event(kind="case-end", case="a", num_done=1, num_total=2, result=make_case("a", "mismatch")),
        Event(kind="case-end", num_done=2, num_total=2, result=make_case("b", "error", reason="x\ny")),
    ]

    def show(console: Console) -> None:
        with open_progress(console) as progress:
            assert isinstance(progress, LineProgress)
            for event in events:
                progress.on_event(event)

    assert print_at(show, terminal=False, width=120).splitlines() == [
        "starting ranks (4 ranks)",
        "golden (1 recipe, each on one device: tiny)",
        "running stress [a]",
        "running a",
        "[1/2] MISMATCH a  216 tensors, worst nan / 1e-10 in gradient_norm, 3.2 s",
        "[2/2] ERROR    b  x",
    ]


def test_steps_of_a_search_have_no_known_number(print_at: Any) -> None:
    def show(console: Console) -> None:
        with open_progress(console, noun="commit") as progress:
            progress.on_event(Event(kind="case-start", case="1a2b subject", note="3 commits left"))
            progress.on_event(Event(kind="case-end", case="1a2b subject", num_done=1))

    shown = ["running 1a2b subject: 3 commits left", "[1] 1a2b subject done"]
    assert print_at(show, terminal=False, width=120).splitlines() == shown


@pytest.mark.parametrize(
    ("silent", "quiet", "shown"), [(0.0, False, True), (60.0, False, False), (0.0, True, False)]
)
def test_only_long_work_is_shown_in_a_log(
    monkeypatch: pytest.MonkeyPatch, silent: float, quiet: bool, shown: bool
) -> None:
    monkeypatch.setattr(progress_module, "_SILENT", silent)
    begun = threading.Event()

    class Log(io.StringIO):
        def write(self, text: str) -> int:
            begun.set()
            return super().write(text)

    log = Log()
    with show_work(open_console(log), "comparing a with b", quiet=quiet):
        if shown:
            assert begun.wait(60)
    assert log.getvalue() == ("comparing a with b\n" if shown else "")


class Recorded(Progress):
    """A view in a terminal that keeps the notes of its events."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def on_event(self, event: Event) -> None:
        self.notes.append(event.note)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_work_with_parts_has_the_time_that_is_left(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    console, view, now = open_console(io.StringIO()), Recorded(), [0.0]
    if is_terminal:
        monkeypatch.setattr(progress_module, "open_progress", lambda *_, **__: view)
    with show_work(console, "comparing", clock=lambda: now[0]) as count:
        for num_done in range(6):
            now[0] = 3.0 * num_done
            count(num_done, 5)
    shown = [f"comparing: {done} of 5, about {15 - 3 * done} s left" for done in range(1, 5)]
    if is_terminal:
        assert view.notes == ["comparing", *shown]
    else:  # from the third second on, at most one in ten seconds
        assert isinstance(console.file, io.StringIO)
        assert console.file.getvalue().splitlines() == shown[:1]


def test_work_without_parts_has_a_line_and_no_bar() -> None:
    progress = LiveProgress(Console(file=io.StringIO(), width=60), clock=lambda: 3.0)
    progress.on_event(Event(kind="work", note="comparing a with b"))
    console = Console(file=io.StringIO(), width=60)
    console.print(progress.render())
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == ["comparing a with b  0.0 s"]


def test_live_progress_fits_and_leaves_nothing(make_case: Any) -> None:
    file = io.StringIO()
    console = Console(file=file, width=60, height=20, force_terminal=True, color_system=None, markup=False)
    now = [0.0]
    with LiveProgress(console, clock=lambda: now[0]) as progress:
        progress.on_event(Event(kind="case-start", case="c" * 90, num_done=3, num_total=20))
        for number in range(12):
            result = make_case(f"case-{number}-{'x' * 80}", "mismatch")
            progress.on_event(Event(kind="case-end", num_done=number, num_total=20, result=result))
        progress.on_event(Event(kind="case-start", case="d" * 90, num_done=12, num_total=20))
        now[0] = 7.0
        still = Console(file=io.StringIO(), width=60)
        with still.capture() as capture:
            still.print(progress.render())
        view = capture.get()
    lines = view.splitlines()
    assert all(len(line) <= 60 for line in lines)
    assert len(lines) == 10  # 8 verdicts, the bar, the running cases
    assert "12 of 20 cases, 12 failed, 7.0 s" in view
    assert lines[-1].startswith("running ddd")
    assert lines[-1].endswith("  7.0 s")
    assert "case-11" in view
    assert "case-3-" not in view
    assert file.getvalue().rstrip().endswith("\x1b[2K")  # erased


def test_live_progress_says_what_is_left(make_case: Any) -> None:
    now = [0.0]
    progress = LiveProgress(Console(file=io.StringIO(), width=90), clock=lambda: now[0])

    def view() -> str:
        still = Console(file=io.StringIO(), width=90)
        with still.capture() as capture:
            still.print(progress.render())
        return capture.get()

    progress.on_event(Event(kind="launch", num_ranks=4, num_total=4))
    assert "ranks up" not in view()
    progress.on_event(Event(kind="up", num_ranks=4, num_total=4))
    assert "4 ranks up" in view()
    progress.on_event(Event(kind="case-start", case="a", num_total=4))
    assert "left" not in view()
    now[0] = 14.0
    progress.on_event(Event(kind="case-end", case="a", num_done=1, num_total=4, result=make_case("a")))
    assert "about 42 s left" in view()
    progress.on_event(Event(kind="case-start", case="b", num_done=1, num_total=4))
    now[0] = 18.0
    assert "about 38 s left" in view()
    now[0] = 38.0
    assert "about 28 s left" in view()  # it takes longer than the first
    progress.on_event(Event(kind="lost"))
    assert "ranks lost" in view()
    progress.on_event(Event(kind="case-end", case="b", num_done=2, num_total=4, result=make_case("b")))
    progress.on_event(Event(kind="case-end", case="c", num_done=3, num_total=4, result=make_case("c")))
    assert "about 13 s left" in view()  # cases took 14, 24 and 0 s
    progress.on_event(Event(kind="case-end", case="d", num_done=4, num_total=4, result=make_case("d")))
    assert "left" not in view()


def test_a_log_says_now_and_then_how_long_the_rest_takes(print_at: Any, make_case: Any) -> None:
    now = [0.0]

    def show(console: Console) -> None:
        progress = LineProgress(console, clock=lambda: now[0])
        for number in range(1, 5):
            now[0] += 6.0
            ended = Event(kind="case-end", num_done=number, num_total=4, result=make_case(f"case-{number}"))
            progress.on_event(ended)

    lines = print_at(show, terminal=False, width=120).splitlines()
    assert [line for line in lines if not line.startswith("[")] == ["about 12 s left"]
    assert lines[2] == "about 12 s left"


def test_goldens_of_a_run_have_a_count_and_the_time_that_is_left(print_at: Any, make_case: Any) -> None:
    now = [0.0]
    ends = [
        Event(kind="golden-end", case=f"r{number}", num_done=number, num_total=5) for number in range(1, 6)
    ]

    def show(console: Console) -> None:
        progress = LineProgress(console, clock=lambda: now[0])
        progress.on_event(Event(kind="golden", recipes=("r1",), num_total=90))
        for end in ends:
            now[0] += 6.0 if end is not ends[-1] else 20.0
            progress.on_event(end)
        progress.on_event(Event(kind="case-end", num_done=1, num_total=90, result=make_case("a")))

    log = print_at(show, terminal=False, width=120).splitlines()
    assert log[1:3] == ["2 of 5 goldens, about 18 s left", "4 of 5 goldens, about 6 s left"]
    assert log[3].startswith("[1/90]")

    live = LiveProgress(Console(file=io.StringIO(), width=60), clock=lambda: now[0])
    live.on_event(Event(kind="golden", recipes=("r1",), num_total=90))
    now[0] += 6.0
    for end, text in ((ends[0], "1 of 5 goldens, about 24 s left"), (ends[-1], "5 of 5 goldens  6.0 s")):
        live.on_event(end)
        still = Console(file=io.StringIO(), width=60)
        with still.capture() as capture:
            still.print(live.render())
        bar, running = capture.get().splitlines()
        assert "0 of 90 cases" in bar
        assert running.startswith(text)


@pytest.mark.parametrize("name", ["fsdp2-ep2", "moe-with-fsdp2-of-8-ranks-and-tp-2-ep-4"])
def test_a_narrow_terminal_shows_both_ends_of_a_name(make_case: Any, name: str) -> None:
    progress = LiveProgress(Console(file=io.StringIO(), width=40))
    progress.on_event(Event(kind="case-end", case=name, result=make_case(name)))
    progress.on_event(Event(kind="case-start", case=name))
    console = Console(file=io.StringIO(), width=40)
    console.print(progress.render())
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert all(len(line) <= 40 for line in lines)
    named = [line for line in lines if name[:4] in line]
    assert len(named) == 2  # the finished one, and the running one
    assert all(name[-4:] in line for line in named)


def test_quiet_progress_prints_nothing(print_at: Any) -> None:
    def show(console: Console) -> None:
        with open_progress(console, quiet=True) as progress:
            assert type(progress) is Progress
            progress.on_event(Event(kind="launch"))

    assert print_at(show) == ""


def test_mesh(print_at: Any) -> None:
    picture = MeshPicture(
        name="hsdp-ep",
        axes={"dp_shard": 2, "cp": 2},
        borrowed={"ep": 4},
        ranks=tuple(
            RankPlace(
                rank=rank,
                coordinates={"dp_shard": rank // 2, "cp": rank % 2, "ep": rank},
                rows=tuple(range(4 * (rank // 2), 4 * (rank // 2) + 4)),
                positions=(0, 1, 2, 3, 12, 13, 14, 15) if rank % 2 == 0 else tuple(range(4, 12)),
                holds={"experts": (rank,)},
            )
            for rank in range(4)
        ),
        groups={"dp_shard": ((0, 2), (1, 3)), "cp": ((0, 1), (2, 3)), "ep": ((0, 1, 2, 3),)},
    )
    text = print_at(lambda console: render(picture, console), terminal=False)
    assert text.splitlines()[0] == "hsdp-ep  4 ranks: dp_shard 2 x cp 2; borrowed: ep 4"
    assert re.search(r"^ +2 +1 +0 +2 +4-7 +0-3, 12-15 +2$", text, re.MULTILINE)
    assert "  dp_shard  0, 2 | 1, 3" in text
    assert "  ep        0-3" in text


@pytest.mark.parametrize(
    ("per_node", "links"),
    [
        (2, ("across 2 nodes", "inside a node", "across 2 nodes")),
        (3, ("1 of 2 groups across 2 nodes", "1 of 2 groups across 2 nodes", "across 2 nodes")),
        (1, ("across 2 nodes", "across 2 nodes", "across 4 nodes")),
        (4, ("inside a node",) * 3),
    ],
)
def test_groups_of_a_mesh_by_node(print_at: Any, per_node: int, links: tuple[str, ...]) -> None:
    picture = MeshPicture(
        name="nodes",
        axes={"dp_shard": 2, "cp": 2},
        borrowed={"ep": 4},
        ranks=tuple(RankPlace(rank=rank, coordinates={}) for rank in range(4)),
        groups={"dp_shard": ((0, 2), (1, 3)), "cp": ((0, 1), (2, 3)), "ep": ((0, 1, 2, 3),)},
        per_node=per_node,
    )
    text = print_at(lambda console: render(picture, console), terminal=False)
    assert re.findall(r"\((.* nodes?)\)$", text, re.MULTILINE) == list(links)
    assert re.search(rf"^ +3 +{3 // per_node} ", text, re.MULTILINE)


def test_mesh_of_one_device(print_at: Any) -> None:
    picture = MeshPicture(name="one", axes={}, ranks=(RankPlace(rank=0, coordinates={}),), groups={})
    text = print_at(lambda console: render(picture, console), terminal=False)
    assert "1 rank: one device" in text
    assert "groups" not in text


def test_every_problem_has_its_line(print_at: Any) -> None:
    problems = [
        Problem("unknown field", "cases/a.yaml", 12, "layout.tq", "write tp"),
        Problem("no file given"),
    ]
    text = print_at(lambda console: render_error(CaseError(problems), console), terminal=False)
    assert text.splitlines() == [
        "cases/a.yaml:12: layout.tq: unknown field",
        "    write tp",
        "error: no file given",
        "2 problems",
    ]
    single = print_at(lambda console: render_error(FormatError("x [bold]; do y"), console), terminal=False)
    assert single == "error: x [bold]; do y\n"


def test_probes(print_at: Any) -> None:
    rows = [
        ProbeRow(name="torch", value="2.13", meaning=""),
        ProbeRow(name="gloo", value="AVG is SUM", meaning="refuse", status="fail"),
        ProbeRow(name="gpu", value="none", meaning="", status="warn"),
    ]
    text = print_at(lambda console: render_probes(rows, console), terminal=False)
    assert re.search(r"^gloo +fail +AVG is SUM +refuse$", text, re.MULTILINE)
    assert text.splitlines()[-1] == "1 ok, 1 warn, 1 fail"


def test_goldens(print_at: Any) -> None:
    changed = GoldenState(
        status="changed", recipe="r", path="longer", recorded="1", current="2", case_file="c"
    )
    rows = [
        GoldenRow(name="a", status="unchanged"),
        GoldenRow(name="longer", status="differs", state=changed),
        GoldenRow(name="new", status="refreshed", state=changed),
    ]
    text = print_at(lambda console: render_goldens(rows, console), terminal=False)
    what = "recipe r has changed: longer was recorded for 1, this is 2"
    assert text.splitlines() == [
        "unchanged a",
        f"differs   longer  {what}; refresh it with `moeverify golden c`",
        f"refreshed new     {what}",
        "3 goldens: 1 unchanged, 1 differs, 1 refreshed",
    ]
    assert is_stale(rows)
    assert not is_stale(rows[:1])
    assert is_stale([GoldenRow(name="a", status="missing")])
    assert is_stale([GoldenRow(name="a", status="unused")])


def test_catalog(print_at: Any) -> None:
    lines = [
        CheckedCase(name="ddp-2", file="", ranks=2, layout="ddp 2", recipe="stress"),
        CheckedCase(name="tp-4", file="", ranks=4, layout="tp 4", recipe="stress"),
    ]
    text = print_at(lambda console: render_catalog(lines, console), terminal=False)
    assert re.search(r"^ddp-2 +2 +ddp 2 +stress$", text, re.MULTILINE)
    assert text.splitlines()[-1] == "2 cases, 1 recipe, at most 4 ranks"
