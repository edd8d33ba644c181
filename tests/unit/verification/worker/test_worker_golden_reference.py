"""Reference values of `diff --golden`: each tensor at the moment of the golden's value, and at no other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from torch import Tensor

from moeverify.cases.schema import Case
from moeverify.faults.setting import make_case
from moeverify.parallel.regions.region import Region
from moeverify.train.assemble import assemble_single
from moeverify.train.loop import train
from moeverify.train.program import TrainingProgram
from moeverify.verification.golden.store import GoldenWriter, StoredGolden
from moeverify.verification.worker.golden_reference import GoldenReference
from moeverify.verification.worker.observed import make_bounds
from multiprocessing_pdb.rank.reference import ReferenceRow

CPU = torch.device("cpu")
WEIGHT = "layers.0.attention.q_proj.weight"
Ask = Callable[[GoldenReference, TrainingProgram, Tensor | None], object]


class Stopped:
    """An observer that queries the reference once a tensor is shown, as a user at a prompt would."""

    def __init__(
        self, reference: GoldenReference, program: TrainingProgram, at: tuple[Any, str, str], ask: Ask
    ) -> None:
        self.reference, self.program = reference, program
        self._at, self._ask = at, ask
        self.said: list[object] = []

    def begin_step(self, step: int) -> None:
        self.reference.begin_step(step)

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        self.reference.observe(step, kind, name, local, region)
        if (step, kind, name) == self._at:
            self.said.append(self._ask(self.reference, self.program, local))


@pytest.fixture(scope="module")
def case() -> Case:
    model, data = {"num_layers": 1}, {"batch": 2, "seq_len": 8}
    made = make_case("reference", optimizer="adamw", model=model, data=data)
    clipped = made.recipe.optimizer.model_copy(update={"clip_norm": 0.01})
    return made.model_copy(update={"recipe": made.recipe.model_copy(update={"optimizer": clipped})})


@pytest.fixture(scope="module")
def golden(case: Case, tmp_path_factory: pytest.TempPathFactory) -> StoredGolden:
    folder = tmp_path_factory.mktemp("golden") / "g"
    with GoldenWriter(folder) as writer:
        train(case.recipe, assemble_single(case.recipe, CPU), writer)
        writer.finish({}, {})
    return StoredGolden(folder)


@pytest.fixture
def stop_at(case: Case, golden: StoredGolden) -> Callable[..., list[object]]:
    """Return a function that trains, queries when a tensor is shown, and returns the results."""

    def stop(
        at: tuple[int, str, str], ask: Ask, *, damage: Callable[[TrainingProgram], None] | None = None
    ) -> list[object]:
        program = assemble_single(case.recipe, CPU)
        if damage is not None:
            damage(program)
        reference = GoldenReference(program, golden, make_bounds(case, golden))
        observer = Stopped(reference, program, at, ask)
        train(case.recipe, program, observer)
        return observer.said

    return stop


def compare(reference: GoldenReference, value: object) -> Sequence[ReferenceRow]:
    return reference.compare(value, lambda: None)


def list_differing(rows: Sequence[ReferenceRow]) -> list[str]:
    return [row.name for row in rows if not math.sqrt(row.squared_error) <= row.bound * row.norm]


@pytest.mark.parametrize(
    "at",
    [
        (0, "token_loss", "lm"),
        (0, "gradient", WEIGHT),
        (1, "gradient_norm", "clip_coefficient"),
        (1, "weight", WEIGHT),
    ],
)
def test_all_of_a_right_run_is_as_in_the_golden_wherever_it_stops(
    stop_at: Callable[..., list[object]], at: tuple[int, str, str]
) -> None:
    (rows,) = stop_at(at, lambda reference, program, local: compare(reference, None))
    assert isinstance(rows, list)
    assert len(rows) > 10
    assert list_differing(rows) == []


def test_a_wrong_weight_is_named_with_its_element_and_what_follows_from_it(
    stop_at: Callable[..., list[object]],
) -> None:
    def damage(program: TrainingProgram) -> None:
        shard = next(shard for shard in program.shards if shard.name == WEIGHT)
        shard.local()[1, 2] += 0.5

    (rows,) = stop_at(
        (0, "gradient", WEIGHT), lambda reference, program, local: compare(reference, None), damage=damage
    )
    assert isinstance(rows, list)
    named = {row.name: row for row in rows}
    wrong = named[f"initial weight {WEIGHT} before step 0"]
    assert wrong.index == (1, 2)
    assert wrong.actual - wrong.expected == pytest.approx(0.5)
    assert wrong.squared_error == pytest.approx(0.25)
    assert wrong.bound == 0.0  # weights before step 0 are equal to the last bit
    assert f"gradient {WEIGHT} at step 0" in list_differing(rows)
    assert "initial weight embed.weight before step 0" not in list_differing(rows)


def find_weight(program: TrainingProgram) -> Tensor:
    return next(shard.tensor for shard in program.shards if shard.name == WEIGHT)


def name_values(reference: GoldenReference, program: TrainingProgram, local: Tensor | None) -> object:
    weight = find_weight(program)
    values = [weight, weight.grad, WEIGHT, program.model.get_submodule(WEIGHT.rpartition(".")[0])]
    return [[row.name for row in compare(reference, value)] for value in values]


def test_values_at_the_prompt_are_found_whatever_they_are(stop_at: Callable[..., list[object]]) -> None:
    (found,) = stop_at((1, "gradient", WEIGHT), name_values)
    assert isinstance(found, list)
    before, gradient = f"weight {WEIGHT} at step 0", f"gradient {WEIGHT} at step 1"
    assert found[:3] == [[before], [gradient], [gradient, before]]
    assert {before, gradient} < set(found[3])
    (later,) = stop_at((1, "weight", WEIGHT), name_values)
    assert isinstance(later, list)
    assert later[0] == [f"weight {WEIGHT} at step 1"]


def test_a_gradient_is_compared_as_it_was_before_the_clip(stop_at: Callable[..., list[object]]) -> None:
    def ask(reference: GoldenReference, program: TrainingProgram, local: Tensor | None) -> object:
        return compare(reference, find_weight(program).grad)

    (rows,) = stop_at((0, "gradient_norm", "clip_coefficient"), ask)
    assert isinstance(rows, list)
    assert list_differing(rows) == []  # the clip by 0.01 has made .grad much smaller by now


@pytest.mark.parametrize("kind", ["update", "token_loss", "gradient"])
def test_the_tensor_that_was_just_shown_is_found_by_its_memory(
    stop_at: Callable[..., list[object]], kind: str
) -> None:
    name = "lm" if kind == "token_loss" else WEIGHT

    def ask(reference: GoldenReference, program: TrainingProgram, local: Tensor | None) -> object:
        return [row.name for row in compare(reference, local)]

    assert stop_at((0, kind, name), ask) == [[f"{kind.replace('_', ' ')} {name} at step 0"]]


def test_a_gradient_that_is_not_complete_says_so(stop_at: Callable[..., list[object]]) -> None:
    def ask(reference: GoldenReference, program: TrainingProgram, local: Tensor | None) -> object:
        return compare(reference, find_weight(program).grad)

    (rows,) = stop_at((0, "token_loss", "lm"), ask)
    assert isinstance(rows, list)
    assert [row.name for row in rows] == [f"gradient {WEIGHT} at step 0, not complete yet"]


def test_what_the_golden_has_not_is_refused(stop_at: Callable[..., list[object]]) -> None:
    def ask(reference: GoldenReference, program: TrainingProgram, local: Tensor | None) -> object:
        refused = []
        for value in (torch.ones(3), "layers.9", 7):
            with pytest.raises(
                LookupError, match="is nothing that the golden has at step 0; it has a parameter"
            ) as error:
                compare(reference, value)
            refused.append(str(error.value).partition(" is nothing")[0])
        return refused

    (refused,) = stop_at((0, "gradient", WEIGHT), ask)
    assert refused == ["this Tensor of shape (3,)", "'layers.9'", "this int"]


def ask_while_it_waits(reference: GoldenReference, program: TrainingProgram, local: Tensor | None) -> object:
    """Return the responses for all tensors with their note, for a gradient, and for a bare name."""
    said: list[object] = [list_differing(compare(reference, None)), reference.note]
    for value in (find_weight(program), find_weight(program).grad, f"gradient {WEIGHT}"):
        try:
            said.append([row.name for row in compare(reference, value)])
        except LookupError as error:
            said.append(str(error).partition("; ")[2])
    return [*said, reference.note]


def test_one_that_waits_compares_what_is_shown_from_the_step_after_the_first_question(
    case: Case, golden: StoredGolden
) -> None:
    program = assemble_single(case.recipe, CPU)
    reference = GoldenReference(program, golden, make_bounds(case, golden), waits=True)
    observer = Stopped(reference, program, (ANY, "gradient_norm", "clip_coefficient"), ask_while_it_waits)
    train(case.recipe, program, observer)
    early, late = observer.said
    assert isinstance(early, list)
    nothing, note, weight, gradient, named, own_note = early
    assert (nothing, weight, own_note) == ([], [f"initial weight {WEIGHT} before step 0"], "")
    # The clip has changed gradients by now: .grad must not pass for the golden's gradient.
    assert gradient == named == note
    assert "ask again in the next step" in note
    gradient = f"gradient {WEIGHT} at step 1"
    before = [f"weight {WEIGHT} at step 0"]
    assert late == [[], "", before, [gradient], [gradient], ""]


def test_one_that_waits_and_is_not_asked_compares_nothing(
    case: Case, golden: StoredGolden, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Tensor:
        raise AssertionError("something was compared")

    monkeypatch.setattr("moeverify.verification.worker.golden_reference.measure", refuse)
    program = assemble_single(case.recipe, CPU)
    train(case.recipe, program, GoldenReference(program, golden, make_bounds(case, golden), waits=True))
