"""The report on the console: its contents, their order, and their width."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from moeverify.report.sorting import VERDICTS, order_findings
from moeverify.report.text import render_run
from moeverify.results.run import GoldenTime, RankReport


def strip(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.fixture
def show(print_at: Any) -> Any:
    def do(run: Any, *, width: int = 80, terminal: bool = True, **options: Any) -> str:
        text = print_at(lambda console: render_run(run, console, **options), width=width, terminal=terminal)
        return strip(text)

    return do


@pytest.mark.parametrize("width", [20, 30, 40, 50, 60])
def test_a_narrow_terminal_loses_neither_a_name_nor_a_verdict(
    make_run: Any, make_case: Any, show: Any, width: int
) -> None:
    names = ("ep2", "hsdp-cp-ep", "tp4-ep2", "fsdp-tp-ep-8", "megablocks-ep2-with-a-name-of-its-own-length")
    run = make_run(*(make_case(name, verdict) for name, verdict in zip(names, VERDICTS, strict=True)))
    table = show(run, width=width).split("\n\n")[0].splitlines()
    assert max(len(line) for line in table) <= width
    cells = "".join(line.split()[0] for line in table if line.strip())
    for name in names:
        assert name in cells  # whole, or folded without a letter lost
    for verdict in VERDICTS:
        assert sum(line.split()[-1].lower() == verdict for line in table if line.strip()) == 1
    assert width < 30 or any(line.split()[0] == "fsdp-tp-ep-8" for line in table if line.strip())


@pytest.mark.parametrize("width", [80, 100, 160])
def test_table_fits_the_width_and_breaks_no_name(make_run: Any, show: Any, width: int) -> None:
    table = show(make_run(), width=width).split("\n\n")[0].splitlines()
    assert max(len(line) for line in table) <= width
    assert len(table) == 2 + 6
    assert re.match(r"ddp-2 +4 +278 in 3 +3\.1e-15 / 1e-10", table[2])
    assert table[4].rstrip().endswith("MISMATCH")
    assert table[6].startswith("fsdp-tp-ep-8 ")


def test_wide_table_names_the_worst_tensor(make_run: Any, show: Any) -> None:
    assert "gradient: blocks.1.moe.experts.12.up.weight" in show(make_run(), width=160).split("\n\n")[0]
    elided = show(make_run(), width=100).split("\n\n")[0]
    assert re.search(r"gradient: \S+\.\.\.\S+weight", elided)


def test_failed_check_stands_before_a_closer_one(make_run: Any, make_case: Any, show: Any) -> None:
    near, failed = (check.model_dump() for check in make_case().checks[:2])
    near["worst"].update(error=9e-11)
    failed.update(verdict="mismatch")
    table = show(make_run(make_case(checks=[near, failed])), width=160).split("\n\n")[0]
    assert "3.1e-15 / 1e-10  gradient: " in table


def test_bitwise_bound_is_called_exact(make_run: Any, make_case: Any, show: Any) -> None:
    checks = [check for check in make_case().checks if check.name == "replica"]
    assert "0 / exact" in show(make_run(make_case(checks=checks)))


@pytest.mark.parametrize("width", [80, 100])
def test_findings_fit_a_terminal(
    make_run: Any, make_case: Any, make_finding: Any, show: Any, width: int
) -> None:
    finding = make_finding(cause="a long cause " * 20, where="x" * 300)
    lines = show(make_run(make_case("a", "mismatch", findings=[finding])), width=width).splitlines()
    # Commands are never broken, so that they can be copied.
    assert all(len(line) <= width for line in lines if not line.startswith("    moeverify "))


def test_log_is_ascii_without_escapes_and_keeps_lines_whole(
    make_run: Any, make_case: Any, make_finding: Any, print_at: Any
) -> None:
    cause = "a long cause " * 30
    name = "tensor" * 40
    run = make_run(make_case("a", "mismatch", findings=[make_finding(cause=cause.strip(), tensor=name)]))
    text = print_at(lambda console: render_run(run, console), width=120, terminal=False)
    assert text.isascii()
    assert "\x1b" not in text
    assert cause.strip() in text
    assert name in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_finding_tells_everything(make_run: Any, show: Any) -> None:
    text = show(make_run())
    for part in (
        "gradient: blocks.1.moe.experts.12.up.weight, step 0",
        "error     3, 3e10 times the bound 1e-10",
        "rank      3 (dp_shard 1, ep 3) is worst, ranks 0-3 differ",
        "scale     actual is 4 times expected, cosine 1",
        "at        [3, 12, 7]: expected 1.25, actual 5.0",
        "cause     everything is 4 = ep times too large",
        "where     backward of blocks.1.moe.combine",
        "evidence  fit residual 2.1e-16",
    ):
        assert part in text


def test_findings_stand_by_step_then_excess_and_fold(
    make_run: Any, make_case: Any, make_finding: Any, show: Any
) -> None:
    findings = [make_finding(tensor=f"late{number}", step=1, error=9.0) for number in range(4)]
    findings += [make_finding(tensor=f"early{number}", error=float(number)) for number in range(1, 4)]
    findings += [make_finding(tensor="broken", error=math.nan)]
    text = show(make_run(make_case("a", "mismatch", findings=findings)))
    told = re.findall(r"gradient: (\w+), step", text)
    assert told == ["broken", "early3", "early2", "early1", "late0"]
    assert "and 3 more findings: --out DIR or --json FILE keeps all" in text
    assert "8 of gradient" in text


def test_kept_run_says_where_findings_are(
    make_run: Any, make_case: Any, make_finding: Any, show: Any
) -> None:
    case = make_case("a", "mismatch", findings=[make_finding(tensor=str(number)) for number in range(6)])
    text = show(make_run(case), folder=Path("runs/1"))
    assert "and 1 more finding: all are in runs/1/result.json" in text
    assert "moeverify report runs/1 --html runs/1/report.html" in text
    assert "moeverify explain runs/1 1" in text


def test_evidence_is_offered_where_it_is_kept_alone(
    make_run: Any, make_case: Any, make_finding: Any, show: Any
) -> None:
    cases = [make_case(name, "mismatch", findings=[make_finding()] * 6) for name in "ab"]
    text = show(make_run(*cases), file=Path("a.json"))
    assert "moeverify explain a.json 1\n" in text
    assert "moeverify explain a.json 7\n" in text
    assert "all are in a.json" in text
    assert "explain" not in show(make_run(*cases))


def test_a_python_caller_is_not_told_of_options(
    make_run: Any, make_case: Any, make_finding: Any, show: Any
) -> None:
    text = show(make_run(make_case("a", "mismatch", file="", findings=[make_finding()] * 6)))
    assert "and 1 more finding: `findings` of the result has all" in text
    assert "--" not in text.split("\n\n", 1)[1]


def test_repeated_cause_is_told_once(make_run: Any, make_case: Any, make_finding: Any, show: Any) -> None:
    case = make_case("a", "mismatch", findings=[make_finding(), make_finding(tensor="other", error=2.0)])
    text = show(make_run(case))
    assert text.count("everything is 4 = ep times too large") == 1
    assert "cause     as above" in text


def test_next_command_keeps_what_makes_the_case(make_run: Any, show: Any) -> None:
    text = show(make_run())
    select = "cases/fsdp2-ep-4.yaml -k fsdp2-ep-4 --set recipe.seed=3"
    assert f"    moeverify run {select} --out runs/fsdp2-ep-4\n" in text
    assert f"    moeverify mesh {select}\n" in text


def test_equal_stacks_are_told_once(make_run: Any, show: Any) -> None:
    text = show(make_run())
    assert text.index("\n  rank 0 raised\n") < text.index("ranks 1-3 hung: same stack")
    assert text.count("wait in <Group object") == 1
    assert "ranks 1, 2: all_reduce #12 over tp" in text
    assert "rank 3: barrier #14" in text
    assert "call(x[19])" in text  # brackets are no markup
    assert "call(x[3])" not in text
    assert "(29 more lines: --out DIR or --json FILE keeps all)" in text


def test_stack_is_cut_at_the_end_where_the_rank_is_not(make_run: Any, make_case: Any, show: Any) -> None:
    frames = [f'  File "train.py", line {number} in f{number}' for number in range(30)]
    header = ["Current thread 0x7f (most recent call first):"]
    for lines in (frames, header + frames):
        report = {"rank": 0, "state": "hung", "summary": "hung", "stack": "\n".join(lines)}
        text = show(make_run(make_case("a", "error", rank_reports=[report])))
        assert "line 0 in f0" in text
        assert "line 29 in f29" not in text
        assert f"({len(lines) - 12} more lines" in text
        stopped = {**report, "state": "stopped", "stack": "\n".join(lines[:6])}
        assert "more lines" not in show(make_run(make_case("a", "error", rank_reports=[stopped])))


def test_what_ranks_refuse_of_a_case_is_told_without_their_stacks(
    make_run: Any, make_case: Any, show: Any
) -> None:
    trace = 'Traceback (most recent call last):\n  File "where.py", line 3, in it\n'
    problems = "layout.parallelize: `a` is none\nlayout.parallelize: `b` is none"
    raised = RankReport(rank=1, state="raised", stack=f"{trace}moeverify.errors.CaseError: {problems}\n")
    waited = RankReport(
        rank=0, state="stopped", stack="Thread 0x7 (most recent call first):\n  File waited.py"
    )
    reason = "rank 1 raised CaseError: layout.parallelize: `a` is none"
    text = show(make_run(make_case("a", "error", reason=reason, rank_reports=[waited, raised])))
    assert text.count("`a` is none") == 2  # below the table, and with its case
    assert "also      layout.parallelize: `b` is none" in text
    assert "where.py" not in text
    assert "waited.py" not in text
    # Any other exception is one of the code, and its stack shows the place.
    other = raised.model_copy(update={"stack": f"{trace}ValueError: {problems}\n"})
    text = show(make_run(make_case("a", "error", rank_reports=[waited, other])))
    assert "where.py" in text
    assert "waited.py" in text


def test_same_reason_and_note_are_told_once(make_run: Any, show: Any) -> None:
    text = show(make_run())
    assert "skipped   fsdp-tp-ep-8, hsdp-8: needs 8 ranks\n" in text
    assert "note      ddp-2, fsdp2-4: an idle expert has no gradient\n" in text


def test_last_line_counts(make_run: Any, show: Any) -> None:
    last = show(make_run(), width=160).splitlines()[-1]
    assert last == "ERROR  6 cases: 2 pass, 1 mismatch, 1 error, 2 skipped; 772 tensors compared; 2 min 21 s"


def test_a_run_in_which_nothing_ran_has_not_passed(make_run: Any, make_case: Any, show: Any) -> None:
    left_out = make_case("megablocks", "skipped", reason="needs megablocks")
    assert show(make_run(left_out, verdict="pass")).splitlines()[-1].startswith("skipped  1 case: 1 skipped;")
    both = make_run(left_out, make_case(), verdict="pass")
    assert show(both).splitlines()[-1].startswith("pass  2 cases: 1 pass, 1 skipped;")


def test_quiet_shows_only_what_failed(make_run: Any, make_case: Any, show: Any) -> None:
    assert show(make_run(make_case(), verdict="pass"), quiet=True).count("\n") == 1
    assert "gradient: blocks.1" in show(make_run(), quiet=True)
    assert "ddp-2" not in show(make_run(), quiet=True)


def test_control_characters_do_not_reach_the_terminal(make_run: Any, make_case: Any, show: Any) -> None:
    run = make_run(make_case("a", "error", reason="bad \x1b[2J\x1b]0;title\x07 \x00thing"))
    text = show(run)
    assert "bad  thing" in text
    assert "\x1b" not in text
    assert "title" not in text


def test_run_without_cases_prints(make_run: Any, show: Any) -> None:
    run = make_run().model_copy(update={"cases": ()})
    assert show(run).splitlines()[-1] == "ERROR  0 cases; 0 tensors compared; 2 min 21 s"


def test_first_finding_of_a_step_has_a_cause(make_finding: Any) -> None:
    far = make_finding(step=1, tensor="far", error=1.0, cause="")
    named = make_finding(step=1, tensor="named", error=1e-9, cause="not reduced over tp")
    later = make_finding(step=2, tensor="later", error=1.0, cause="not reduced over tp")
    assert [finding.tensor for finding in order_findings([far, later, named])] == ["named", "far", "later"]


def test_what_the_diagnosis_has_put_first_leads_its_step(make_finding: Any) -> None:
    lead = make_finding(step=1, tensor="lead", error=1e-9, cause="cut from the graph")
    far = make_finding(step=1, tensor="far", error=1.0, cause="absent")
    early = make_finding(step=0, tensor="early", error=1e-9, cause="not reduced over tp")
    assert [finding.tensor for finding in order_findings([lead, far, early])] == ["early", "lead", "far"]


def test_rounding_alone_puts_no_finding_before_another(make_finding: Any) -> None:
    lead, first, second = (
        make_finding(tensor=name, error=error, cause="")
        for name, error in (("lead", 0.5), ("first", 1.0), ("second", 1.0 + 4e-16))
    )
    assert [finding.tensor for finding in order_findings([lead, first, second])] == [
        "lead",
        "first",
        "second",
    ]


def test_goldens_that_were_made_are_named_the_longest_first_and_many_are_summed(
    make_run: Any, show: Any
) -> None:
    goldens = tuple(GoldenTime(recipe=f"recipe-{number}", seconds=10.0 + number) for number in range(6))
    (line,) = (
        line for line in show(make_run(goldens=goldens), width=200).splitlines() if line.startswith("goldens")
    )
    assert re.findall(r"(recipe-\d) ([\d.]+) s", line) == [
        (f"recipe-{number}", f"{10 + number}.0") for number in (5, 4, 3, 2)
    ]
    assert "2 more 21.0 s" in line
    assert "\ngoldens" not in show(make_run())
