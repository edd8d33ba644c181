"""`moeverify faults` and `--fault` with unknown names: one clear message, exit code 2, no launch."""

import json
from pathlib import Path
from typing import Any

import pytest

from moeverify.cli.arguments import RunSettings
from moeverify.explain.fitting.order import MECHANISMS
from moeverify.results.run import CaseResult, Event
from moeverify.verification.controller import fault_benchmark, mutation
from moeverify.verification.controller.options import RunOptions

UNKNOWN = "`moeverify faults list` shows all"


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["run", "Z99", "QQ"], ["2 problems", "no fault `Z99`", "no fault `QQ`", UNKNOWN]),
        (["run", "a1"], ["no fault `a1`", "did you mean `A"]),
        (["run", "expert-gradient"], ["no fault `expert-gradient`", "did you mean `expert_gradients`?"]),
        (["show", "Z99"], ["no fault `Z99`", UNKNOWN]),
        (["list", "Z99"], ["no fault `Z99`", UNKNOWN]),
        (["run", "A", "-k", "no-such-word"], ["no fault of ", "matches `no-such-word`", UNKNOWN]),
        (["run", "-k", "and"], ["`and` cannot be read: expected a word"]),
        (["clean", "-k", "no-such-word"], ["no clean run of ", "matches `no-such-word`", "seed 0"]),
        (["clean", "-k", "("], ["`(` cannot be read"]),
        (
            ["run", "A01", "--without", "unmovd", "--without", "explain"],
            ["--without: no hypothesis `unmovd`", "the hypotheses are reordered, ", "altered, explain"],
        ),
        (["run", "A01", "--without", "unmoved", "--only", "explain"], ["give one of the two"]),
        (["run", "A01", "--precision", "float16"], ["Invalid value for '--precision'"]),
        (["run", "A01", "--markdown", "/dev/null/page.md"], ["cannot write /dev/null/page.md"]),
        (["clean", "--markdown", "/dev/null/page.md"], ["cannot write /dev/null/page.md"]),
        (
            ["mutate", "a.b:c:stale:0"],
            ["no mutant `a.b:c:stale:0`", "`moeverify faults mutate --list` shows all"],
        ),
        (["mutate", "--json", "/dev/null/rows.json"], ["cannot write /dev/null/rows.json"]),
        (["mutate", "--keep", "/dev/null/rows"], ["cannot write /dev/null/rows"]),
    ],
)
def test_what_is_not_there(invoke: Any, words: list[str], texts: list[str]) -> None:
    result = invoke("faults", *words)
    assert result.exit_code == 2
    assert result.stdout == ""
    for text in texts:
        assert text in flat(result.stderr)


def test_faults_are_chosen_by_number_by_class_and_by_words(invoke: Any) -> None:
    def numbers(*words: str) -> list[str]:
        lines = invoke("faults", "list", *words).stdout.splitlines()
        return [line.split()[0] for line in lines]

    assert len(numbers()) >= 100
    assert numbers("m") == ["M01", "M02", "M03", "M04", "M05"]
    assert numbers("precision") == numbers("Precision") == numbers("m")
    assert numbers("expert_gradients", "optimizer") == [*numbers("A"), "N01", "N02", "N03"]
    assert numbers("b01", "M02") == ["B01", "M02"]
    assert numbers("-k", "expert_gradients and fsdp2") == ["A05"]
    assert "B01" in numbers("-k", "router and tp")
    assert "B05" not in numbers("-k", "router and tp")
    assert set(numbers("B", "-k", "router")) < set(numbers("B"))


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("no_such_module:f", "there is no module `no_such_module` for `no_such_module:f`"),
        ("moeverify.faults.no_such:f", "there is no module `moeverify.faults.no_such`"),
        ("own:brek", "has no `brek` did you mean `break_it`?"),
        ("own", "`own` is no function, and no fault write `package.module:function`, or a number of"),
        ("A99", "`A99` is no function, and no fault"),
        ("broken:f", "broken.py:1: "),
    ],
)
@pytest.mark.parametrize("command", ["run", "reshard"])
def test_a_function_that_is_not_there(
    invoke: Any, case_file: Path, command: str, fault: str, text: str
) -> None:
    (case_file.parent / "own.py").write_text("def break_it():\n    pass\n")
    (case_file.parent / "broken.py").write_text("def (:\n")
    result = invoke(command, case_file, "--set", "recipe.steps=4", "--fault", fault)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert text in flat(result.stderr)


def test_a_number_of_the_catalogue_is_its_function() -> None:
    target = "moeverify.faults.catalogue.expert_gradients:a05_fsdp2_expert_divisor"
    assert RunSettings(fault="a05").make_options([], None).fault == target
    assert RunSettings().make_options([], None).fault is None


def test_a_list_names_the_class_of_each_fault_and_show_says_what_it_is(invoke: Any) -> None:
    lines = invoke("faults", "list", "gradient_norm").stdout.splitlines()
    assert all(line.split()[1] == "gradient_norm" for line in lines)
    shown = invoke("faults", "show", "H03").stdout
    assert "class      H, gradient_norm: " in shown
    assert "--fault H03\n" in shown


def test_an_interrupt_while_wider_precisions_run_leaves_the_table(
    invoke: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_one(cases: Any, options: Any, on_event: Any) -> None:
        result = CaseResult(
            name=cases[0].name,
            file="",
            verdict="mismatch",
            ranks=2,
            seconds=1.0,
            recipe=cases[0].recipe.name,
            layout="ep 2",
        )
        on_event(Event(kind="case-end", case=result.name, result=result, num_done=1, num_total=2))
        raise KeyboardInterrupt

    monkeypatch.setattr(fault_benchmark, "run_cases", run_one)
    result = invoke("faults", "run", "A01", "A03", "--precision", "bfloat16")
    assert result.exit_code == 130, result.stderr
    assert "A01    yes       NO       NO" in result.stdout
    assert "detected: 1 of 1" in flat(result.stdout)
    assert "A03" not in result.stdout


@pytest.mark.parametrize(
    ("words", "left_out", "seconds"),
    [
        ((), (), 60.0),
        (("--without", "unmoved", "--without", "detached"), ("unmoved", "detached"), 60.0),
        (("--without", "explain"), ("explain",), 0.0),
        (("--only", "explain"), MECHANISMS[:-1], 60.0),
        (("--only", "unmoved"), tuple(name for name in MECHANISMS if name != "unmoved"), 0.0),
    ],
)
def test_mechanisms_are_left_out(
    invoke: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: tuple[str, ...],
    left_out: tuple[str, ...],
    seconds: float,
) -> None:
    asked: list[RunOptions] = []

    def run_cases(cases: Any, options: RunOptions, on_event: Any) -> None:
        asked.append(options)

    monkeypatch.setattr(fault_benchmark, "run_cases", run_cases)
    page = tmp_path / "page.md"
    assert invoke("faults", "run", "A01", *words, "--markdown", page).exit_code == 0
    assert [(options.without, options.explain_seconds) for options in asked] == [(left_out, seconds)]
    assert " ".join(["`moeverify faults run A01", *words]) + "`" in page.read_text()


def test_mutants_run_in_the_precision_that_was_asked_for(
    invoke: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[mutation.MutationOptions] = []

    def run(how: mutation.MutationOptions, options: Any, on_event: Any) -> mutation.RanMutants:
        asked.append(how)
        return mutation.RanMutants([], {}, 9, 2, ("tp", "pp"))

    monkeypatch.setattr(mutation, "run_mutants", run)
    rows = tmp_path / "rows.json"
    result = invoke("faults", "mutate", "--precision", "mixed", "--no-escalate", "--json", rows)
    assert result.exit_code == 0, result.output
    assert "layouts that mixed does not know: tp, pp" in flat(result.stdout)
    command = json.loads(rows.read_text())["command"]
    assert command == "moeverify faults mutate --number 60 --seed 0 --precision mixed --no-escalate"
    assert "does not know" not in invoke("faults", "mutate").stdout
    assert [(how.precision, how.escalates) for how in asked] == [("mixed", False), (None, True)]
