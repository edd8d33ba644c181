"""The page in a real browser: it renders without errors, tables fold and filter, no other script runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html import escape, unescape
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image
from report_cases import EXPERTS, TIMELINE, WITHOUT_PICTURES, make_failing
from test_operator_page import make_table

from moeverify.report import operator_page
from moeverify.report.formats.html import format_page
from moeverify.report.pictures.registry import draw_case
from moeverify.report.pictures.theme import PALETTE

Load = Callable[[str], tuple[str, list[str]]]

# A reader's actions, after the page's script: open, filter, show more.
READER = """
const details = document.querySelector("details.rows");
const count = () => details.querySelectorAll("tbody tr").length;
const log = [count()];
details.open = true;
setTimeout(() => {
  log.push(count());
  details.querySelector("button").click();
  log.push(count());
  const input = details.querySelector("input");
  input.value = "EXTRA.7 gradient";
  input.dispatchEvent(new Event("input"));
  log.push(count(), details.querySelector("[role=status]").textContent);
  input.value = "";
  input.dispatchEvent(new Event("input"));
  log.push(count());
  document.querySelector("a[href^='#case-']").click();
  log.push(location.hash, document.querySelectorAll("svg").length);
  document.body.dataset.log = JSON.stringify(log);
}, 200);
"""

# The page of Perfetto, which answers at the second question, and what it is sent.
PERFETTO = """
const port = new MessageChannel().port1;
const asked = [];
window.open = () => port;
port.postMessage = async (data, origin) => {
  asked.push(origin);
  if (data === "PING" && asked.length < 2) return;
  if (data === "PING") return dispatchEvent(new MessageEvent("message", { data: "PONG", source: port }));
  const trace = new Blob([data.perfetto.buffer]).stream().pipeThrough(new DecompressionStream("gzip"));
  document.body.dataset.trace = await new Response(trace).text();
  document.body.dataset.log = [data.perfetto.fileName, ...asked].join(" ");
};
document.querySelector("a.trace").click();
"""


@pytest.fixture
def load(browser: ModuleType) -> Load:
    """Return a function that opens a page and returns its elements and its console output."""
    return browser.dump


@pytest.fixture(scope="module")
def page() -> str:
    from moeverify.results.run import RunResult

    cases = (make_failing(extra=900),)
    return format_page(RunResult(verdict="mismatch", environment={"torch": "2.13"}, cases=cases))


def test_rows_are_made_when_they_are_asked_for_and_filtered(
    load: Load, page: str, screenshots: ModuleType
) -> None:
    elements, console = load(screenshots.add_script(page, READER))
    assert console == []
    (log,) = re.findall(r'data-log="([^"]*)"', elements)
    # 918 findings follow: none at first, 200 and 400 of them, those with both words, 200 again.
    matching = sum("extra.7" in f"layers.1.extra.{number}" for number in range(900))
    expected = (
        f'[0,200,400,{matching},"{matching} shown of {matching} that match, 918 in all",200,"#case-1",7]'
    )
    assert log.replace("&quot;", '"') == expected


def test_the_page_as_it_is_runs_its_script(load: Load, page: str) -> None:
    elements, console = load(page.replace('<details class="rows">', '<details class="rows" open>'))
    assert console == []
    assert elements.count('class="filter"') == 1
    assert "200 shown of 918" in elements
    # Error, first step, place, cause, next action; then every picture with its sentence.
    for asked in (EXPERTS[0], "step 0", "efsdp", "moeverify run"):
        assert asked in elements
    for name, picture in draw_case(make_failing()):
        assert f'id="case-1-{name}-title"' in elements
        assert f"<figcaption>{escape(picture.caption, quote=False)}</figcaption>" in elements


def test_a_trace_is_sent_to_perfetto_when_it_answers(load: Load, page: str, screenshots: ModuleType) -> None:
    elements, console = load(screenshots.add_script(page, PERFETTO))
    assert console == []
    log, trace = (re.findall(f'data-{each}="([^"]*)"', elements)[0] for each in ("log", "trace"))
    assert log == " ".join([f"{make_failing().name}.json.gz", *3 * ["https://ui.perfetto.dev/"]])
    events = json.loads(unescape(trace))["traceEvents"]
    assert sum(each["ph"] == "X" for each in events) == sum(map(len, TIMELINE.ranks))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_screenshot_has_the_colours_of_its_screen(
    load: Load, page: str, scheme: str, tmp_path: Path, screenshots: ModuleType
) -> None:
    source, image = tmp_path / "source.html", tmp_path / "image.png"
    source.write_text(page)
    screenshots.take(source, image, screenshots.Shot("image", "run", ("mesh",), scheme, 640, 300))
    with Image.open(image) as shown:
        assert shown.size == (640, 300)
        corner = shown.convert("RGB").getpixel((2, 2))
        num_colors = len(shown.convert("RGB").getcolors() or ())
    expected = PALETTE["back"][scheme == "dark"]
    assert corner == pytest.approx([int(expected[at : at + 2], 16) for at in (1, 3, 5)], abs=6)
    assert num_colors > 8  # more than an empty page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.usefixtures("load")
def test_a_page_of_all_verdicts_breaks_no_rule_of_accessibility(
    scheme: str, screenshots: ModuleType, make_run: Any
) -> None:
    if screenshots.find_rules() is None:
        pytest.skip("needs axe-core-python")
    page = format_page(make_run(make_failing(extra=3), *make_run().cases))
    assert screenshots.audit(page, scheme) == []
    assert screenshots.audit(operator_page.format_page(make_table()), scheme) == []
    bad = page.replace("</main>", "<img></main>")
    assert [line.split(": ")[1] for line in screenshots.audit(bad, scheme)] == ["image-alt"]


def test_a_script_that_came_with_a_name_does_not_run(load: Load, page: str) -> None:
    evil = "<script>document.title='broken'</script><img src=x onerror=document.title='broken'>"
    from moeverify.results.run import RunResult

    case = make_failing(evil, reason=evil, notes=(evil,))
    findings = [each.model_copy(update={"tensor": f"{evil}{each.step}"}) for each in case.findings]
    evil_case = case.model_copy(update={"findings": tuple(findings), "layout": evil, "file": evil})
    text = format_page(RunResult(verdict="mismatch", environment={evil: evil}, cases=(evil_case,)))
    elements, console = load(text.replace('<details class="rows">', '<details class="rows" open>'))
    assert console == []  # all of it is text
    assert "<title>moeverify: mismatch</title>" in elements
    assert "<img" not in elements
    # The browser also refuses unescaped code.
    elements, console = load(page.replace("</main>", f"{evil}</main>"))
    assert "<title>moeverify: mismatch</title>" in elements
    assert "Content Security Policy" in " ".join(console)


def test_a_run_of_ten_thousand_cases_opens(load: Load, make_run: Any, make_case: Any, tmp_path: Path) -> None:
    cases = [make_case(f"case-{number}") for number in range(9_990)]
    failed = [make_failing(f"failed-{number}", extra=50, **WITHOUT_PICTURES) for number in range(10)]
    text = format_page(make_run(*cases, *failed))
    assert len(text) < 6e6
    elements, console = load(
        text.replace('<details class="rows"><summary>All', '<details class="rows" open><summary>All')
    )
    assert console == []
    assert "200 shown of 10000" in elements
    assert elements.index("failed-9") < elements.index(">case-0<")
    assert elements.count("<svg") == 5 * 3  # pictures of the first five failures
