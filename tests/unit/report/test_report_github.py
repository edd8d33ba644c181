"""Annotations at lines of case files, and the summary in Markdown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from report_cases import make_failing

from moeverify.errors import Problem
from moeverify.report.formats.markdown import format_markdown
from moeverify.report.github import annotate_problems, annotate_run

EVIL = "<img src=x> | `a` **b** [c](d) \n::error::e ## f"


def parse(line: str) -> tuple[dict[str, str], str]:
    """Return the properties and the text of a workflow command, unescaped as GitHub does it."""
    match = re.fullmatch(r"::error ([^:\n]*)::([^\n]*)", line)
    assert match is not None, line

    def restore(text: str) -> str:
        for code, letter in (("%3A", ":"), ("%2C", ","), ("%0D", "\r"), ("%0A", "\n"), ("%25", "%")):
            text = text.replace(code, letter)
        return text

    pairs = (part.split("=", 1) for part in match[1].split(","))
    return {name: restore(value) for name, value in pairs}, restore(match[2])


def test_a_failure_is_at_the_line_of_the_layout_or_of_the_field_at_fault(
    make_run: Any, make_case: Any, tmp_path: Path
) -> None:
    file = tmp_path / "cases" / "a.yaml"
    file.parent.mkdir()
    file.write_text("name: a\nrecipe:\n  steps: 3\nlayout:\n  ep: 2\n")
    failed = make_failing("a", file=str(file))
    refused = make_case("b", "error", file=str(file), reason="recipe.steps is too many", checks=())
    lines = list(annotate_run(make_run(make_case("good"), failed, refused), tmp_path))
    (first, text), (second, reason) = map(parse, lines)
    assert first == {"file": "cases/a.yaml", "line": "4", "title": "moeverify: a mismatch"}
    assert text.splitlines()[1:3] == ["since: step 0", "first tensor: gradient: layers.0.moe.experts.gate"]
    assert (second["line"], reason) == ("3", "recipe.steps is too many")


def test_a_case_without_a_file_is_annotated_all_the_same(make_run: Any, tmp_path: Path) -> None:
    for file in ("", str(tmp_path / "gone.yaml")):
        ((properties, _),) = map(
            parse, annotate_run(make_run(make_failing("x", file=file)), Path("/elsewhere"))
        )
        assert properties.get("file", "") == file
        assert "line" not in properties


def test_the_tenth_annotation_says_how_many_more_there_are(make_run: Any) -> None:
    lines = list(annotate_run(make_run(*(make_failing(f"c{number}") for number in range(13)))))
    assert len(lines) == 10
    assert parse(lines[-1])[1].endswith("and 3 more cases failed")


def test_nothing_in_a_name_begins_another_command(make_run: Any) -> None:
    lines = list(annotate_run(make_run(make_failing(EVIL, file="a,b:c%0A.yaml"))))
    (line,) = lines
    properties, _ = parse(line)
    assert properties == {"file": "a,b:c%0A.yaml", "title": f"moeverify: {EVIL} mismatch"}


def test_problems_are_at_their_own_lines() -> None:
    problems = [Problem("unknown field", "a.yaml", 7, "layout.epp", "did you mean ep?"), Problem("no case")]
    (first, text), (second, _) = map(parse, annotate_problems(problems))
    assert (first["file"], first["line"]) == ("a.yaml", "7")
    assert text == "layout.epp: unknown field; did you mean ep?"
    assert set(second) == {"title"}


def test_the_summary_has_failures_first_and_every_case(make_run: Any, make_case: Any) -> None:
    text = format_markdown(make_run(make_case("good"), make_failing("bad")))
    assert text.startswith("## moeverify: error\n\n2 cases: 1 pass, 1 mismatch; ")
    assert (
        text.index("### bad: mismatch") < text.index("| since | step 0 |") < text.index("| good | pass | 4 |")
    )
    assert "    moeverify run cases/bad.yaml -k bad " in text


def test_names_in_the_summary_stay_text(make_run: Any) -> None:
    text = format_markdown(make_run(make_failing(EVIL, layout=EVIL)))
    assert not [
        line for line in text.splitlines() if "<img" in line and not line.startswith("    ")
    ]  # except code
    assert "&lt;img src=x&gt; \\| \\`a\\` \\*\\*b\\*\\* \\[c\\](d) ::error::e \\#\\# f |" in text
    assert not [line for line in text.splitlines() if line.startswith("::")]


def test_the_summary_of_a_huge_run_fits_into_what_github_takes(make_run: Any, make_case: Any) -> None:
    cases = [make_case(f"case-{number}") for number in range(2000)]
    failed = [make_failing(f"failed-{number}") for number in range(30)]
    text = format_markdown(make_run(*cases, *failed))
    assert len(text.encode()) < 1 << 20
    assert "10 more cases failed." in text
    assert "1030 more cases not listed." in text
