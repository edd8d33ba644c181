"""Mutants: made from the syntax tree alone, run in memory, and undone."""

import ast
from collections import Counter
from pathlib import Path

import pytest
import torch

from moeverify.cases.schema import PRECISIONS
from moeverify.errors import CaseError
from moeverify.faults.injection import check_fault, injected
from moeverify.faults.mutation import mutant as mutants
from moeverify.faults.mutation.apply import mutated
from moeverify.faults.mutation.coverage import executed_spans, list_spans_of_file, read_spans, write_spans
from moeverify.faults.mutation.mutant import ROOT, choose_mutants, find_mutant, list_mutants
from moeverify.faults.mutation.operators import OPERATORS
from moeverify.faults.setting import make_case
from moeverify.report.mutation import describe_left_out, describe_rates, summarize_mutants, write_mutants
from moeverify.results.cause import Cause
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.factor import Factor, Product
from moeverify.results.finding import Finding
from moeverify.results.mutation import CoveredCode, MutantRow
from moeverify.results.operation import Altered, Scaled
from moeverify.results.part import WHOLE, Contribution
from moeverify.results.place import Place
from moeverify.results.run import CaseResult, Event, RunResult
from moeverify.verification.controller import escalation
from moeverify.verification.controller import mutation as controller
from moeverify.verification.controller.kept import KeptRows
from moeverify.verification.controller.options import RunOptions

ORDER = "parallel.expert:order_by_expert"
TP = make_case("tp", tp=2)


def pick(function, operator):
    return next(m for m in list_mutants() if m.function == function and m.operator == operator)


def test_every_operator_makes_mutants_with_names_of_their_own():
    found = list_mutants()
    assert {m.operator for m in found} == set(OPERATORS)
    assert max(Counter(m.name for m in found).values()) == 1
    assert all(m.before != m.after for m in found)


def test_nothing_that_runs_at_import_is_mutated():
    # Decorators, defaults and annotations are evaluated on import: changing them afterwards has no effect.
    tree = ast.parse(
        "@wrap(1 + 2)\ndef f(x: a + b = 3 + 4) -> c + d:\n    'doc' + 'string'\n    return x + 5\n"
    )
    nodes = {ast.unparse(node) for _, node in mutants._list_nodes(tree) if isinstance(node, ast.BinOp)}
    assert nodes == {"'doc' + 'string'", "x + 5"}


def test_a_seed_chooses_the_same_mutants_of_all_operators_and_parts_them():
    found = list_mutants()
    chosen = choose_mutants(found, 80, seed=3)
    assert [m.name for m in chosen] == [m.name for m in choose_mutants(list(reversed(found)), 80, seed=3)]
    assert {m.operator for m in chosen} == set(OPERATORS)
    assert [m.name for m in chosen] != [m.name for m in choose_mutants(found, 80, seed=4)]


@pytest.mark.slow
def test_mutants_of_every_operator_run_and_are_undone():
    for mutant in choose_mutants(list_mutants(), 2 * len(OPERATORS), seed=1):
        with mutated(mutant):
            pass


def test_a_mutant_changes_what_a_function_does_for_all_who_have_imported_it():
    from moeverify.parallel.expert import order_by_expert

    arriving = torch.tensor([[1, 2], [3, 1]])
    there, back = order_by_expert(arriving, 7)
    mutant = pick("order_by_expert", "reorder")
    with injected(mutant.target):
        swapped = order_by_expert(arriving, 7)
    assert torch.equal(swapped[0], back)
    assert torch.equal(swapped[1], there)
    assert torch.equal(order_by_expert(arriving, 7)[0], there)


def test_a_stale_value_goes_with_its_mutant():
    from moeverify.train import clipping

    def clip(norm):
        return float(clipping.clip_gradients([], torch.tensor(norm), 1.0))

    with mutated(pick("clip_gradients", "stale")):
        assert clip(2.0) == clip(4.0) == pytest.approx(0.5)
        assert any(name.startswith("_kept_by_a_mutant") for name in vars(clipping))
    assert clip(4.0) == pytest.approx(0.25)
    assert not any(name.startswith("_kept_by_a_mutant") for name in vars(clipping))


def test_a_function_inside_another_is_reached_by_the_one_around_it():
    from moeverify.parallel import moe_tensor

    class Group:
        def size(self):
            return 2

        def rank(self):
            return 1

    shift = pick("slice_positions", "off-by-one")
    with mutated(shift):
        assert list(moe_tensor.slice_positions(range(8), Group())) != [4, 5, 6, 7]
    assert list(moe_tensor.slice_positions(range(8), Group())) == [4, 5, 6, 7]
    inner = pick("apply_token_slices.after", "swap-collective")
    before = moe_tensor.apply_token_slices.__code__
    with mutated(inner):
        assert "all_gather_sum" in _list_names(moe_tensor.apply_token_slices.__code__)
    assert moe_tensor.apply_token_slices.__code__ is before
    assert "all_gather_sum" not in _list_names(before)


def _list_names(code):
    inner = [each for each in code.co_consts if hasattr(each, "co_names")]
    return {*code.co_names, *(name for each in inner for name in _list_names(each))}


def test_an_unknown_mutant_is_refused_with_a_remedy():
    with pytest.raises(CaseError, match=r"no mutant `parallel\.expert:order_by_expert:reorder:9`"):
        check_fault(f"mutant:{ORDER}:reorder:9")
    check_fault(f"mutant:{ORDER}:reorder:0")


def test_what_is_executed_is_seen_in_the_files_that_were_asked_for_alone(tmp_path):
    from moeverify.cases.axes import groups
    from moeverify.faults import setting

    with executed_spans(ROOT, ["faults/setting.py"]) as spans:
        groups.list_degrees(setting.make_case("seen", tp=2))
    write_spans(tmp_path / "rank-0.json", spans)
    found = read_spans(tmp_path)
    assert list(found) == ["faults/setting.py"]
    source = (ROOT / "faults/setting.py").read_text().split("\n")
    one_line = [span for span in found["faults/setting.py"] if span[0] == span[2]]
    seen = {source[line - 1][start:end] for line, start, _, end in one_line}
    # One branch only of a conditional expression, and of the functions those that were called.
    assert {'optimizer == "sgd"', "_SGD"} <= seen
    assert "_ADAMW" not in seen
    assert not any("make_saved_case" in each for each in seen)


def test_what_is_executed_once_more_is_seen_once_more():
    from moeverify.faults import setting

    blocks = []
    for _ in range(2):
        with executed_spans(ROOT, ["faults/setting.py"]) as spans:
            setting.make_case("seen", tp=2)
        blocks.append(spans)
    assert blocks[0]["faults/setting.py"]
    assert blocks[0] == blocks[1]


SUM_OVER_SHARDS = "train.clipping:gradient_norm:double-collective:0"
"""A branch of a conditional expression that only FSDP1 takes; its condition runs under every layout."""


def test_a_mutant_of_a_branch_runs_where_the_branch_is_taken():
    mutant = find_mutant(SUM_OVER_SHARDS)
    (line, start, _, end) = mutant.span
    of_line = {span for span in list_spans_of_file(ROOT / mutant.file) if span[0] == line}
    beside = {span for span in of_line if span[3] <= start or span[1] >= end}
    assert beside
    assert not mutant.is_executed(beside)
    assert mutant.is_executed(of_line)
    covered = [
        CoveredCode(name=name, ranks=2, seconds=1.0, spans={mutant.file: tuple(spans)})
        for name, spans in (("tp", beside), ("fsdp1", of_line), ("fsdp2", beside))
    ]
    assert controller.choose_layouts(mutant, covered) == ["fsdp1"]


def test_every_mutant_is_executed_where_all_of_its_file_is():
    assert [m.name for m in list_mutants() if not m.is_executed(list_spans_of_file(ROOT / m.file))] == []


def test_a_mutant_runs_under_the_smallest_layouts_each_with_another_axis():
    mutant = pick("finalize_gradients", "skip-statement")

    def covered(name, ranks, seconds, of=mutant):
        spans = {of.file: tuple(list_spans_of_file(ROOT / of.file))} if of else {}
        return CoveredCode(name=name, ranks=ranks, seconds=seconds, spans=spans)

    rows = [
        covered("fsdp2-tp", 4, 1.0),
        covered("tp", 2, 3.0),
        covered("tp-sp-lp", 2, 4.0),
        covered("fsdp2", 2, 1.0, None),
        covered("cp-allgather", 2, 5.0),
    ]
    # The code serves every axis: a data axis comes first, and then the layout with most other axes.
    assert controller.choose_layouts(mutant, rows) == ["cp-allgather", "fsdp2-tp"]
    latent = pick("_parallelize_latent", "other-placement")
    of_tp = [covered(each.name, each.ranks, each.seconds, latent) for each in rows]
    assert controller.choose_layouts(latent, of_tp)[0] == "tp"


def test_a_mutant_runs_where_its_function_takes_another_branch():
    mutant = find_mutant("parallel.plan:shard_mesh:other-denominator:0")
    first, last = mutant.function_lines
    source = (ROOT / mutant.file).read_text().split("\n")
    assert source[first - 1].startswith("def shard_mesh")
    inside = {span for span in list_spans_of_file(ROOT / mutant.file) if first <= span[0] and span[2] <= last}
    replicas = {span for span in inside if "dp_replicate" in source[span[0] - 1][span[1] : span[3]]}
    # The branch of a mesh of two dims: where it is not taken, its tuple is not made.
    branch = {
        span
        for span in replicas
        if source[span[0] - 1][span[1] : span[3]].startswith('mesh["dp_replicate", ')
    }
    assert branch
    assert mutant.is_executed(inside - branch)
    covered = [
        CoveredCode(name=name, ranks=ranks, seconds=1.0, spans={mutant.file: tuple(spans)})
        for name, ranks, spans in (
            ("fsdp2", 2, inside - branch),
            ("fsdp2-cp-ep", 4, inside - branch),
            ("mixed fsdp2-ep", 2, inside),
            ("hsdp", 4, inside),
        )
    ]
    # Cases that take the branch come before cases with more axes, and cases not in float64 last.
    assert controller.choose_layouts(mutant, covered) == ["fsdp2", "hsdp", "fsdp2-cp-ep", "mixed fsdp2-ep"]


def find(
    cause, operation, *, quantity=Quantity.GRADIENT, module="", tensor="layers.1.mlp.up_proj.weight", axes=()
):
    subject = Subject(quantity=quantity, tensors=(tensor,), module=module)
    explanation = Explanation(cause=cause, subject=subject, operation=operation)
    return Finding(
        check="gradient",
        kind="gradient",
        tensor=tensor,
        step=0,
        rank=0,
        error=1.0,
        bound=0.0,
        code=cause.value,
        explanation=explanation,
        place=Place(axes=axes),
    )


def scale(*products, part=WHOLE, value=2.0):
    return Scaled(contributions=(Contribution(part=part, factor=Factor(value=value, equals=products)),))


def row(name, outcome, **fields):
    content = {"operator": "stale", "file": "a.py", "line": 1, "before": "x", "after": "y"}
    return MutantRow(name=name, outcome=outcome, **{**content, **fields})


def test_the_table_counts_outcomes_and_the_page_shows_survivors_first():
    rows = [
        row("a", "detected", loss_and_norm=True),
        row("b", "detected"),
        row("c", "crashed"),
        row("d", "survived"),
        row("e", "equivalent"),
    ]
    *_, counts = ([cell.strip() for cell in line.split("|")[1:-1]] for line in summarize_mutants(rows))
    assert counts == ["5", "0", "0", "0", "1", "2", "1", "0", "1"]
    rates = describe_rates(rows)
    assert rates[0].startswith("killed: 3 of 4")
    assert rates[2].startswith("seen by losses and gradient norm at 1e-3: 1 of 2")
    environment = dict.fromkeys(("torch", "python", "device", "cores"), "?")
    page = write_mutants(rows, environment, "moeverify faults mutate", (9, 2))
    names = [line.split("`")[1] for line in page.split("\n") if line.startswith("| `")]
    assert names == ["d", "a", "b", "c", "e"]


def test_to_round_to_what_a_recipe_computes_in_is_no_bug_of_it():
    kinds = [m for m in list_mutants() if m.operator == "narrow-dtype"]
    halved = next(m for m in kinds if m.after.endswith("float32"))
    rounded = next(m for m in kinds if "bfloat16" in m.after and "bfloat16" not in m.before)
    assert [halved.is_bug_in(each) for each in PRECISIONS] == [each == "float64" for each in PRECISIONS]
    assert [each for each in PRECISIONS if rounded.is_bug_in(each)] == ["float64", "float32"]
    assert all(pick("gradient_norm", "drop-collective").is_bug_in(each) for each in PRECISIONS)


def test_layouts_that_a_precision_does_not_know_are_left_out_by_name():
    mixed, wide = controller.list_cases_in("mixed"), controller.list_cases_in("float64")
    assert {case.recipe.precision for case in mixed.values()} == {"mixed"}
    assert "fsdp2-ep" in mixed
    assert "tp" not in mixed
    assert "tp" in wide
    assert wide["mixed fsdp2-ep"].recipe.precision == "float64"
    assert controller.list_cases_in(None) == controller.list_cases()
    said = describe_left_out([row("a", "no bug"), row("b", "survived")], "mixed", ["tp", "pp"])
    assert said == ["no bug in mixed, and not run: a", "layouts that mixed does not know: tp, pp"]
    assert describe_left_out([row("b", "survived")], "float32", []) == []


def cover(layout, mutant):
    spans = {mutant.file: tuple(list_spans_of_file(ROOT / mutant.file))}
    return CoveredCode(name=layout, ranks=2, seconds=1.0, spans=spans)


def test_what_is_no_bug_in_a_precision_and_what_no_layout_of_it_executes_do_not_run(monkeypatch):
    monkeypatch.setattr(controller, "run_cases", None)
    rounded = pick("RingExchangeCore.__call__", "narrow-dtype")
    heads = pick("_parallelize_latent", "other-placement")
    covered = [cover("latent tp", each) for each in (rounded, heads)]
    run = controller.MutationRun([rounded, heads], covered, KeptRows(None, {}, MutantRow), "mixed")
    rows = run.execute(RunOptions(), lambda event: None)
    assert [each.outcome for each in rows] == ["no bug", "not executed"]
    assert all(each.cases == () for each in rows)


def test_wider_precisions_are_asked_of_what_has_no_cause(monkeypatch):
    mutant = find_mutant("train.clipping:gradient_norm:double-collective:1")
    covered = [cover("tp", mutant)]
    placed = find(Cause.BACKWARD, Altered(), quantity=Quantity.MODULE_GRADIENT, module="layers.0.attention")
    named = find(Cause.SCALE, scale(Product(times=("tp",))))
    ran = []

    def answer(cases, options, on_event):
        results = []
        for case in cases:
            ran.append((case.recipe.precision, options.case_faults[case.name]))
            finding = named if case.recipe.precision == "float64" else placed
            result = CaseResult(
                name=case.name, file="", verdict="mismatch", ranks=2, seconds=1.0, findings=(finding,)
            )
            on_event(Event(kind="case-end", result=result))
            results.append(result)
        return RunResult(verdict="mismatch", environment={}, started="", seconds=1.0, cases=tuple(results))

    monkeypatch.setattr(controller, "run_cases", answer)
    monkeypatch.setattr(escalation, "run_cases", answer)
    for escalates, cause in ((True, Cause.SCALE), (False, Cause.BACKWARD)):
        ran.clear()
        run = controller.MutationRun([mutant], covered, KeptRows(None, {}, MutantRow), "bfloat16")
        (row,) = run.execute(RunOptions(), lambda event: None, escalates=escalates)
        assert (row.outcome, row.cases, row.finding.code) == ("detected", ("tp",), cause.value)
        wider = ["float32", "float64"] if escalates else []
        assert ran == [(each, mutant.target) for each in ["bfloat16", *wider]]


def test_what_passes_in_a_layout_is_asked_in_float64(monkeypatch):
    mutant = find_mutant("train.clipping:gradient_norm:double-collective:1")
    covered = [cover("tp", mutant)]
    named = find(Cause.SCALE, scale(Product(times=("tp",))))
    ran = []

    def answer(cases, options, on_event):
        results = []
        for case in cases:
            ran.append((case.recipe.precision, options.case_faults[case.name]))
            shown = case.recipe.precision == "float64"
            verdict, findings = ("mismatch", (named,)) if shown else ("pass", ())
            result = CaseResult(
                name=case.name, file="", verdict=verdict, ranks=2, seconds=1.0, findings=findings
            )
            on_event(Event(kind="case-end", result=result))
            results.append(result)
        return RunResult(verdict="pass", environment={}, started="", seconds=1.0, cases=tuple(results))

    monkeypatch.setattr(controller, "run_cases", answer)
    monkeypatch.setattr(escalation, "run_cases", answer)
    for escalates, outcome in ((True, "detected"), (False, "survived")):
        ran.clear()
        run = controller.MutationRun([mutant], covered, KeptRows(None, {}, MutantRow), "bfloat16")
        (row,) = run.execute(RunOptions(), lambda event: None, escalates=escalates)
        assert (row.outcome, row.cases) == (outcome, ("tp",))
        wider = ["float64"] if escalates else []
        assert ran == [(each, mutant.target) for each in ["bfloat16", *wider]]


def test_a_pipeline_with_a_tied_weight_is_a_layout_of_its_own():
    # A case without weights on both its first and last stage does not show whether these sum the gradient.
    mutant = find_mutant("parallel.meshes:_group_ends:skip-statement:1")
    names = ["pp", "tied pp", "tied pp-zbv", "tied tp-sp-lp"]
    assert ("tied ends", True) in controller._list_traits("tied pp")
    for name in ("tied tp-sp-lp", "tied pp-zbv"):  # one stage, and two ends on one rank
        assert ("tied ends", True) not in controller._list_traits(name)
    covered = [cover(name, mutant) for name in names]
    assert "tied pp" in controller.choose_layouts(mutant, covered)


def test_a_name_leads_to_its_mutant():
    mutant = pick("order_by_expert", "reorder")
    assert find_mutant(mutant.target) == mutant


def test_what_a_hung_mutant_reports_names_files_of_the_package_alone():
    mutant = find_mutant("train.clipping:gradient_norm:double-collective:1")
    waits = f"rank 0 waits in all_reduce #1 called at {ROOT}/parallel/gradients.py:65 in _reduce"
    result = CaseResult(name="pp", file="", verdict="error", ranks=2, seconds=1.0, reason=waits)
    run = controller.MutationRun([mutant], [], 0, KeptRows(None, {}, MutantRow))
    row = run._make_row(mutant.name, "hung", result)
    assert (
        row.reason == "rank 0 waits in all_reduce #1 called at moeverify/parallel/gradients.py:65 in _reduce"
    )


def test_coverage_is_kept_beside_the_results(tmp_path: Path) -> None:
    options = controller.MutationOptions(keep=tmp_path / "rows.jsonl")
    assert options.keep_coverage == tmp_path / "rows-coverage.jsonl"
    assert controller.MutationOptions().keep_coverage is None
