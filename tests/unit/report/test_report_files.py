"""JSON, JUnit and HTML: read back, written completely or not at all, with clear errors for bad files."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import stat
from collections.abc import Iterator
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from report_cases import make_failing

from moeverify.errors import CaseError, FormatError
from moeverify.report.failure import describe_failure, name_failure
from moeverify.report.files import check_writable, write_atomically
from moeverify.report.formats import registry
from moeverify.report.formats.html import format_page
from moeverify.report.formats.json import read_run
from moeverify.report.formats.junit import format_junit
from moeverify.report.formats.registry import FORMATS, write_run
from moeverify.results.failure import EndKind, RankEnd, Waiting
from moeverify.results.load import ExpertLoad
from moeverify.results.run import SCHEMA_VERSION, RankReport, RunResult
from moeverify.results.trace import CollectiveRecord
from moeverify.tools.placement.trace_file import read_trace

NASTY = "a \x00b\x1b[31m <tag> & \"quote\" \x0b\ufffe 'x' ]]>"


def test_json_comes_back_equal(make_run: Any, make_case: Any, make_finding: Any, tmp_path: Path) -> None:
    finding = make_finding(error=math.inf, scale=-math.inf, expected=1e-300, cause=NASTY)
    run = make_run(*make_run().cases, make_case("b", "mismatch", findings=[finding]))
    write_run("json", run, tmp_path / "deep" / "result.json")
    again = read_run(tmp_path / "deep")
    assert again.model_dump_json() == run.model_dump_json()
    assert read_run(tmp_path / "deep" / "result.json").model_dump_json() == run.model_dump_json()
    assert again.cases[-1].findings[0] == finding
    nan = again.cases[2].checks[2].worst
    assert nan is not None
    assert math.isnan(nan.error)


def test_json_has_the_promised_keys(make_run: Any, tmp_path: Path) -> None:
    write_run("json", make_run(), tmp_path / "run.json")
    content = json.loads((tmp_path / "run.json").read_text())
    assert content["schema_version"] == SCHEMA_VERSION
    assert {"verdict", "environment", "cases"} <= content.keys()
    case = content["cases"][2]
    assert {"name", "file", "verdict", "reason", "ranks", "seconds", "checks", "findings"} <= case.keys()
    assert {"name", "verdict", "tensors", "worst"} <= case["checks"][0].keys()
    assert {"tensor", "error", "bound"} <= case["checks"][0]["worst"].keys()
    keys = {"check", "tensor", "step", "rank", "error", "bound", "scale", "cosine", "cause", "where"}
    assert keys <= case["findings"][0].keys()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"  \n", "is empty"),
        (b'{"schema_version": 1, "cases": [', "was cut off"),
        (b"\xff\xfe\x00", "is not text"),
        (b"[1, 2]", "is JSON but no run"),
        (b"{}", "is JSON but no run"),
        (b'{"schema_version": "x"}', "which no moeverify wrote"),
        (b'{"schema_version": true}', "which no moeverify wrote"),
        (b'{"schema_version": 0}', "which no moeverify wrote"),
        (b'{"schema_version": %d}' % (SCHEMA_VERSION + 1), "upgrade moeverify"),
        (
            b'{"schema_version": 1, "verdict": "x", "environment": {}, "cases": []}',
            "1: verdict: Input should be",
        ),
        (b'{"schema_version": 1, "cases": []}', "verdict: Field required, and 1 more wrong fields"),
        (b"[" * 200_000, "nested too deeply"),
    ],
)
def test_unreadable_json_is_named_with_a_remedy(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(content)
    with pytest.raises(FormatError) as caught:
        read_run(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)
    assert ";" in str(caught.value)


def _replace_each(value: Any, wrong: Any) -> Iterator[Any]:
    """Yield copies of `value`, in each of which one inner value is `wrong`."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        for changed in (wrong, *_replace_each(inner, wrong)):
            copied = copy.copy(value)
            copied[key] = changed
            yield copied


@pytest.mark.parametrize("wrong", ["x", 2.5, None, [], {}, [[]]])
def test_a_wrong_value_anywhere_is_refused_or_read(
    make_run: Any, make_case: Any, make_finding: Any, tmp_path: Path, wrong: Any
) -> None:
    path = tmp_path / "run.json"
    write_run("json", make_run(make_case("a", "mismatch", findings=[make_finding()])), path)
    content = json.loads(path.read_text())
    del content["checksum"]
    content["schema_version"] = 2  # later versions have a checksum
    for changed in _replace_each(content, wrong):
        path.write_text(json.dumps(changed))
        with suppress(FormatError):
            read_run(path)


def test_every_flipped_bit_is_noticed_with_its_line(make_run: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_run("json", make_run(), path)
    whole, dice = path.read_bytes(), random.Random(0)
    for at in dice.sample(range(len(whole) - 1), 60):
        content = bytearray(whole)
        content[at] ^= 1 << dice.randrange(8)
        path.write_bytes(content)
        line = whole.count(b"\n", 0, at) + 1
        with pytest.raises(FormatError, match=rf"^{path}:({line}|{line + 1}): ") as caught:
            read_run(path)
        assert whole[at : at + 1] == b"\n" or str(caught.value).startswith(f"{path}:{line}: ")


def test_runs_of_older_versions_need_no_checksum(make_run: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_run("json", make_run(), path)
    content = json.loads(path.read_text())
    del content["checksum"]
    for version in (SCHEMA_VERSION, 2):
        path.write_text(json.dumps(content | {"schema_version": version}))
        if version == 2:
            assert len(read_run(path).cases) == len(content["cases"])
        else:
            with pytest.raises(FormatError, match="the checksum is missing"):
                read_run(path)


def test_every_truncation_is_noticed(make_run: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_run("json", make_run(), path)
    whole = path.read_bytes()
    for length in range(0, len(whole) - 2, 997):
        path.write_bytes(whole[:length])
        with pytest.raises(FormatError):
            read_run(path)


def test_missing_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="there is no such file"):
        read_run(tmp_path / "nothing.json")
    with pytest.raises(FormatError, match=r"holds no result\.json"):
        read_run(tmp_path)


def test_failed_write_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_write_keeps_mode_and_link(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("old")
    target.chmod(0o640)
    link = tmp_path / "link"
    link.symlink_to(target)
    with target.open() as reader:
        write_atomically(link, "new")
        assert reader.read() == "old"  # a concurrent reader sees either the old or the new file
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    # A private pipe: if this ever fails as root, it must not replace a device of the machine.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomically(pipe, "new")
        assert os.read(reader, 10) == b"new"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_unwritable_places_are_told_at_once_and_before(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    files = [tmp_path, tmp_path / "file" / "a.json", tmp_path / "new" / "ok.json"]
    with pytest.raises(CaseError) as caught:
        check_writable(files, tmp_path / "file")
    messages = [problem.message for problem in caught.value.problems]
    assert len(messages) == 3
    assert "is a folder" in messages[0]
    assert all(problem.remedy for problem in caught.value.problems)
    assert list((tmp_path / "new").iterdir()) == []


def test_junit_counts_and_texts(make_run: Any, tmp_path: Path) -> None:
    write_run("junit", make_run(), tmp_path / "junit.xml")
    suite = ET.parse(tmp_path / "junit.xml").getroot()[0]
    assert [suite.get(key) for key in ("tests", "failures", "errors", "skipped")] == ["6", "1", "1", "2"]
    assert suite.get("timestamp") == "2025-11-21T09:00:00"
    properties = {element.get("name"): element.get("value") for element in suite.iter("property")}
    assert properties["torch"] == "2.13.0"
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    assert cases["ddp-2"].get("classname") == "cases.ddp-2"
    assert cases["ddp-2"].find("failure") is None
    failure = cases["fsdp2-ep-4"].find("failure")
    assert failure is not None
    message = "gradient: blocks.1.moe.experts.12.up.weight, step 0: error 3, bound 1e-10: everything is 4"
    assert failure.get("message", "").startswith(message)
    assert "cause: everything is 4 = ep times too large" in (failure.text or "")
    error = cases["tp-2-sequence"].find("error")
    assert error is not None
    assert error.get("message") == "rank 0 raised E"
    assert "ranks 1-3 hung" in (error.text or "")
    assert "RuntimeError: boom at 0x7f00" in (error.text or "")
    skipped = cases["hsdp-8"].find("skipped")
    assert skipped is not None
    assert skipped.get("message") == "needs 8 ranks"


def test_junit_stays_xml_whatever_ranks_say(make_run: Any, make_case: Any, make_finding: Any) -> None:
    finding = make_finding(cause=NASTY, tensor=NASTY)
    case = make_case("a", "mismatch", reason=NASTY, findings=[finding], notes=[NASTY])
    run = make_run(case, environment={NASTY: NASTY})
    text = format_junit(run)
    failure = next(ET.fromstring(text).iter("failure"))
    assert '<tag> & "quote"' in (failure.text or "")
    assert "\x00" not in text
    assert "\ufffe" not in text


@pytest.mark.parametrize("name", [each.name for each in FORMATS if each.name != "trace"])
def test_every_format_has_cases_without_a_file(
    make_run: Any, make_case: Any, tmp_path: Path, name: str
) -> None:
    case = make_case("run-b against run-a").model_copy(update={"file": ""})
    write_run(name, make_run(case), tmp_path / "written")
    assert (tmp_path / "written").exists()


def test_junit_folds_many_findings(make_run: Any, make_case: Any, make_finding: Any) -> None:
    run = make_run(make_case("a", "mismatch", findings=[make_finding(tensor=f"t{i}") for i in range(70)]))
    failure = next(ET.fromstring(format_junit(run)).iter("failure"))
    assert "and 20 more" in (failure.text or "")
    assert (failure.text or "").count("gradient: t") == 50


class Page(HTMLParser):
    """A collector of open elements, unclosed elements, links, and text by element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "link", "img", "br"):
            self.stack.append(tag)
        for name, value in attrs:
            if name in ("href", "src"):
                self.links.append(value or "")
            if name == "id":
                self.ids.add(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_page_is_complete_and_needs_nothing_else(make_run: Any, tmp_path: Path) -> None:
    write_run("html", make_run(), tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    text = " ".join(page.text)
    assert page.stack == []
    assert not {"link", "img", "iframe", "image"} & set(page.tags)
    assert page.tags.count("script") == 1
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    # Each case's row, each failure's card, and the link that skips the header.
    assert len([link for link in page.links if link.startswith("#case-")]) == 6 + 2
    for part in (
        "blocks.1.moe.router.weight",
        "everything is 4 = ep times too large",
        "ranks 1-3 hung",
        "RuntimeError: boom at 0x7f00",
        "needs 8 ranks",
        "an idle expert has no gradient",
        "exact",
    ):
        assert part in text


def test_a_hang_begins_with_the_rank_that_others_wait_for(make_case: Any) -> None:
    pending = CollectiveRecord.model_validate(
        {"number": 3, "op": "all_reduce", "group": (0, 1), "sequence": 1, "state": "started"}
        | {"signature": "all_reduce", "group_name": "g"}
    )
    late, early = (
        RankReport(
            rank=rank,
            state="hung",
            end=RankEnd(how=EndKind.OVER_TIME, timeout=20.0, waiting=waiting),
            summary=f"it is at net.py:{rank}",
            stack="",
        )
        for rank, waiting in ((1, Waiting(place="net.py:1")), (0, Waiting(collective=pending)))
    )
    case = make_case("hung", "error", reason="over its 20 s", rank_reports=(late, early))
    assert name_failure(case) == "rank 1 hung: it is at net.py:1"
    assert ("reason", "over its 20 s") in list(describe_failure(case))
    # Ranks that are all in collectives disagree: no one of them is the cause.
    assert name_failure(case.model_copy(update={"rank_reports": (early,)})) == "over its 20 s"


def test_page_escapes_what_ranks_say(make_run: Any, make_case: Any, make_finding: Any) -> None:
    evil = "<script>alert(1)</script>" + NASTY
    finding = make_finding(cause=evil, tensor=evil, evidence=(evil,))
    case = make_case(evil, "mismatch", file=evil, reason=evil, findings=[finding], notes=(evil,))
    text = format_page(make_run(case, environment={evil: evil}, command=evil))
    assert Page(text).tags.count("script") == 1  # the page's own
    assert "alert(1)</script>" not in text
    assert "\x00" not in text
    assert "&lt;script&gt;" in text


def test_page_bounds_many_findings(make_run: Any, make_case: Any, make_finding: Any) -> None:
    findings = [make_finding(tensor=f"t{i}", follows="t" * (i > 0)) for i in range(1006)]
    text = format_page(make_run(make_case("a", "mismatch", findings=findings)))
    assert "1000 findings that follow from these" in text
    assert "and 5 more findings" in text


@pytest.mark.slow
def test_a_page_of_100_failed_cases_has_less_than_2_mb() -> None:
    failing = make_failing(extra=900)
    cases = tuple(failing.model_copy(update={"name": f"case-{at}"}) for at in range(100))
    text = format_page(RunResult(verdict="mismatch", environment={}, cases=cases))
    assert len(text.encode()) < 2_000_000
    assert text.count('class="finding"') == text.count('<section class="case"') == 60
    assert "and 902 more findings" in text


LOAD = ExpertLoad(layers=(1, 3), num_experts=2, num_sources=2, top_k=1, copies=((((5, 0), (1, 7)),) * 2,) * 3)


def test_every_format_is_a_file_of_its_name_that_leaves_nothing_of_a_failure(
    make_run: Any, make_case: Any, tmp_path: Path
) -> None:
    run = make_run(make_case("a", load=LOAD))
    folder = Path(registry.__file__).parent
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "registry"}
    assert {each.name for each in FORMATS} == files
    (tmp_path / "file").write_text("")
    for each in FORMATS:
        write_run(each.name, run, tmp_path / "new" / each.name)
        assert (tmp_path / "new" / each.name).stat().st_size > 100
        with pytest.raises(OSError, match="file"):
            write_run(each.name, run, tmp_path / "file" / each.name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "new"]


def test_the_load_of_a_case_is_a_trace_that_a_placement_is_made_of(
    make_run: Any, make_case: Any, tmp_path: Path
) -> None:
    write_run("trace", make_run(make_case("a", load=LOAD), make_case("b")), tmp_path / "load.trace")
    trace = read_trace(tmp_path / "load.trace")
    assert (trace.header.layers, trace.header.num_sources, trace.steps) == ((1, 3), 2, (0, 1, 2))
    assert trace.copies.tolist() == [[[[5, 0], [1, 7]]] * 2] * 3


@pytest.mark.parametrize("loads", [(), (LOAD, LOAD)])
def test_a_trace_is_of_one_case(loads: Any, make_run: Any, make_case: Any, tmp_path: Path) -> None:
    cases = [make_case(f"case-{number}", load=load) for number, load in enumerate(loads)]
    with pytest.raises(OSError, match="a trace is of one case"):
        write_run("trace", make_run(*cases), tmp_path / "load.trace")
    assert not list(tmp_path.iterdir())
