"""The page of operators: its file is read or refused with an error, and its script's actions work."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moeverify.errors import FormatError
from moeverify.report.formats import html
from moeverify.report.operator_file import name_file, read, write
from moeverify.report.operator_page import describe_table, format_page
from moeverify.results.operator_table import (
    CallSite,
    Compared,
    Operator,
    OperatorList,
    OperatorResult,
    OperatorTable,
)
from moeverify.results.run import CaseResult, RunResult

DRIVER = Path(__file__).parent / "operator_page.js"
RESULT = (OperatorResult(shape=(4, 8), dtype="float64"),)
SITES = (
    CallSite(file="model.py", line=3, function="forward", expression="x @ w"),
    CallSite(file="moeverify/train/loop.py", line=7, function="run", expression="a < '</script>'"),
)


def make_list(*names: str, module: str = "layers.0") -> OperatorList:
    """Return operators that each take the one before; the last is a derivative of the first."""
    last = len(names) - 1
    return OperatorList(
        sites=SITES,
        operators=tuple(
            Operator(
                name=name,
                phase="backward" if place == last else "forward",
                module="" if place == last else module,
                sites=(place % 2,),
                results=RESULT,
                inputs=(place - 1,) if place else ("embed.weight",),
                origin=0 if place == last else -1,
            )
            for place, name in enumerate(names)
        ),
    )


def make_table() -> OperatorTable:
    """Return a table in which the second rank multiplies by another number."""
    right = (
        Compared(outcome="match", other=0, place="whole", error=0.0),
        Compared(outcome="match", other=2, place="dim 0: 0-3 of 8", error=1e-17),
        Compared(outcome="alone"),
        Compared(outcome="multiple", other=3, factor=0.5, error=1e-12),
    )
    wrong = (right[0], Compared(outcome="differs", other=2, error=0.25), *right[2:])
    return OperatorTable(
        version=1,
        title="ep2",
        step=1,
        expected_name="one device",
        actual_name="ep 2",
        bound=1e-8,
        expected=(make_list("mm.default", "view.default", "mul.Tensor", "mm.default"),),
        actual=(make_list("mm.default", "mul.Tensor", "collective.all_reduce", "mm.default"),) * 2,
        compared=(right, wrong),
        causes=((1, 1),),
        notes=("5 operators are not compared: the time was over",),
    )


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = name_file(tmp_path, "a/b")
    write(make_table(), path)
    assert (path.parent, path.name) == (tmp_path / "operators", "a-b.json.gz")
    assert read(path) == make_table()


def change(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Return a function that sets a field of the JSON by its dotted path."""

    def do(content: dict[str, Any]) -> None:
        *parents, last = key.split(".")
        target: Any = content
        for each in parents:
            target = target[int(each)] if isinstance(target, list) else target[each]
        target[int(last) if isinstance(target, list) else last] = value

    return do


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (change("version", 9), "version: 9, and this moeverify reads 1"),
        (change("step", "soon"), "step: Input should be a valid integer"),
        (change("expected.0.operators.1.sites", [7]), "expected.0.operators.1.sites: no such call site"),
        (change("actual.1.operators.1.inputs", [-3]), "actual.1.operators.1.inputs: no such operator"),
        (change("actual.0.operators.1.origin", 40), "actual.0.operators.1.origin: no such operator"),
        (change("compared.1.0.other", 44), "compared.1.0.other: no such operator"),
        (change("compared.1.0.other_rank", 1), "compared.1.0.other: no such operator"),
        (change("compared", []), "compared: not as many as there are operators"),
        (change("causes", [[1, 99]]), "causes.0: no such operator"),
    ],
)
def test_a_wrong_field_is_told_by_its_name(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], None], told: str
) -> None:
    path = tmp_path / "table.json"
    write(make_table(), path)
    content = json.loads(path.read_text())
    spoil(content)
    path.write_text(json.dumps(content))
    with pytest.raises(FormatError, match=re.escape(told)) as raised:
        read(path)
    assert raised.value.problem.startswith(str(path))
    assert raised.value.remedy == "run the case again with --out"


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"\x1f\x8b\x08broken", gzip.compress(b"{}", mtime=0)[:-6], b'{"version": 1, "a": '],
    ids=repr,
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "table.json.gz"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"table\.json\.gz.*run the case again"):
        read(path)


def test_the_terminal_counts_the_outcomes_and_names_the_first_wrong_operator() -> None:
    assert list(describe_table(make_table())) == [
        "forward   3 match, 1 differ, 2 without counterpart",
        "backward  2 a multiple",
        "first wrong: operator 1 of rank 1, mul.Tensor, moeverify/train/loop.py:7 in run",
    ]


def test_nothing_in_the_data_ends_its_element() -> None:
    page = format_page(make_table())
    assert page.count("</script>") == 2
    data = re.search(r'id="operators">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert not set("<>&").intersection(data[1])
    assert "a < '</script>'" in json.loads(data[1])["strings"]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_of_the_page_searches_filters_folds_and_jumps(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(format_page(make_table()))
    done = subprocess.run(["node", DRIVER, page], capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert found["begin"] == {
        "rank": "1",
        "count": "5 of 5 rows",
        "lines": [
            "▾ forward (4, 1 differ)",
            "▾ layers.0 (4, 1 differ)",
            "#0 mm.default float64[4, 8]|#0 mm.default float64[4, 8] (whole)|model.py:3 in forward|match",
            "#1 view.default float64[4, 8]||moeverify/train/loop.py:7 in run|without counterpart",
            "#2 mul.Tensor float64[4, 8]|#1 mul.Tensor float64[4, 8]"
            "|moeverify/train/loop.py:7 in run|differs by 0.25",
            "|#2 collective.all_reduce float64[4, 8]|model.py:3 in forward|without counterpart",
            "▾ backward (1)",
            "▾ outside of modules (1)",
            "#3 mm.default float64[4, 8]|#3 mm.default float64[4, 8]|moeverify/train/loop.py:7 in run|0.5 times",
        ],
        "selected": ["#2 mul.Tensor float64[4, 8]"],
        "marked": ["#2 mul.Tensor float64[4, 8]"],
        "hash": "#r1-1",
    }
    # Keys fold and unfold the module of the selected row, and select the row above and the last one.
    view, last = "#1 view.default float64[4, 8]", "#3 mm.default float64[4, 8]"
    assert found["keys"] == [[5, []], [9, ["#2 mul.Tensor float64[4, 8]"]], [9, [view]], [9, [last]]]
    rows = {name: found[name] for name in ("search", "phase", "outcome", "not", "module", "own", "moves")}
    assert rows == {
        "search": ["#2 mul.Tensor float64[4, 8]"],
        "phase": ["#3 mm.default float64[4, 8]"],
        "outcome": ["#2 mul.Tensor float64[4, 8]"],
        "not": [
            "#1 view.default float64[4, 8]",
            "#2 mul.Tensor float64[4, 8]",
            "",
            "#3 mm.default float64[4, 8]",
        ],
        "module": [
            "#0 mm.default float64[4, 8]",
            "#1 view.default float64[4, 8]",
            "#2 mul.Tensor float64[4, 8]",
            "",
        ],
        "own": ["#0 mm.default float64[4, 8]", ""],
        "moves": [
            "#0 mm.default float64[4, 8]",
            "#2 mul.Tensor float64[4, 8]",
            "",
            "#3 mm.default float64[4, 8]",
        ],
    }
    assert found["folded"] == [
        "▾ forward (4, 1 differ)",
        "▸ layers.0 (4, 1 differ)",
        "▾ backward (1)",
        "▸ outside of modules (1)",
    ]
    # The producer of the wrong operator, although a filter and the folds hide it.
    assert (found["jumped"]["hash"], found["jumped"]["count"]) == ("#r1-0", "5 of 5 rows")
    assert found["other"] == {"rank": "0", "marked": []}


def test_the_page_of_a_run_links_the_operators_beside_it(tmp_path: Path) -> None:
    kept = name_file(tmp_path / "run", "ep2")
    write(make_table(), kept)
    case = CaseResult(
        name="ep2", file="", verdict="mismatch", ranks=2, seconds=1.0, operators="/gone/operators/ep2.json.gz"
    )
    run = RunResult(verdict="mismatch", environment={}, started="", seconds=1.0, cases=(case,))
    page = tmp_path / "run" / "report.html"
    html.write(run, page)  # the folder was moved: the file is found in it
    assert '<a href="report.ep2.operators.html">' in page.read_text()
    assert "collective.all_reduce" in (page.parent / "report.ep2.operators.html").read_text()
    kept.write_bytes(b"cut off")
    html.write(run, page)
    assert "operators.html" not in page.read_text()
