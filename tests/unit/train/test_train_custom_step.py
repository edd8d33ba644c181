"""A user's own step: the tensors shown of it, and the errors for a step that cannot run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moeverify.cases.validation.load import build_case
from moeverify.errors import CaseError
from moeverify.parallel.regions.local_shard import parameters
from moeverify.train.assemble import assemble_single
from moeverify.train.custom_step import CustomStep, StepTrace
from moeverify.train.loop import train
from moeverify.train.target import import_path

PROGRAM = """
import torch
from torch import nn
from torch.nn import functional as F


def make():
    return nn.Sequential(nn.Embedding(16, 4), nn.Linear(4, 16))


def backward(model, micro_batches):
    for tokens, targets in micro_batches:
        logits = model(tokens)
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()


def plain(model, optimizer, micro_batches):
    optimizer.zero_grad()
    backward(model, micro_batches)
    optimizer.step()


def clips(model, optimizer, micro_batches, clip_norm):
    optimizer.zero_grad()
    backward(model, micro_batches)
    nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()


def clips_as_before(model, optimizer, micro_batches, clip_norm):
    optimizer.zero_grad()
    backward(model, micro_batches)
    nn.utils.clip_grad_norm(model.parameters(), clip_norm)
    optimizer.step()


def clips_some(model, optimizer, micro_batches, clip_norm):
    optimizer.zero_grad()
    backward(model, micro_batches)
    nn.utils.clip_grad_norm_(model[0].parameters(), clip_norm)
    nn.utils.clip_grad_norm_(model[1].parameters(), 2 * clip_norm)
    optimizer.step()


def clips_by_hand(model, optimizer, micro_batches, clip_norm):
    optimizer.zero_grad()
    backward(model, micro_batches)
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    coefficient = min(1.0, clip_norm / (float(norm) + 1e-6))
    for p in model.parameters():
        p.grad *= coefficient
    optimizer.step()
    return {"gradient_norm": norm, "clip_coefficient": coefficient, "loss": 1.5}


def steps_schedule(model, optimizer, micro_batches, scheduler):
    plain(model, optimizer, micro_batches)
    scheduler.step()


def keeps(model, optimizer, micro_batches):
    backward(model, micro_batches)
    optimizer.step()


def never_steps(model, optimizer, micro_batches):
    backward(model, micro_batches)


def steps_twice(model, optimizer, micro_batches):
    plain(model, optimizer, micro_batches)
    optimizer.step()


def fails(model, optimizer, micro_batches):
    raise RuntimeError("out of patience")


def takes_two(model, optimizer):
    pass


def wants_more(model, optimizer, micro_batches, tokenizer):
    pass


def misspells(model, optimizer, micro_batches):
    plain(model, optimizer, micro_batches)
    return {"grad_norm": 1.0}


def returns_text(model, optimizer, micro_batches):
    plain(model, optimizer, micro_batches)
    return {"loss": "low"}


def returns_list(model, optimizer, micro_batches):
    plain(model, optimizer, micro_batches)
    return [1.0]
"""


@pytest.fixture(autouse=True, scope="module")
def _module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("program")
    (Path(folder) / "steps_of_mine.py").write_text(PROGRAM)
    with import_path([str(folder)]):
        yield


class Shown:
    """An observer that keeps the shown tensors, by (step, kind, name)."""

    def __init__(self) -> None:
        self.tensors: dict[tuple[int, str, str], Tensor] = {}

    def begin_step(self, step: int) -> None:
        pass

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: object) -> None:
        if local is not None:
            self.tensors[step, kind, name] = local.detach().clone()


def run(step: str | None, **optimizer: Any) -> tuple[Shown, CustomStep | None]:
    recipe = {
        "model": {"factory": "steps_of_mine:make", "vocab_size": 16},
        "data": {"batch": 4, "seq_len": 4},
        "optimizer": {"name": "sgd", "lr": 0.5, **optimizer},
        **({"step": f"steps_of_mine:{step}"} if step else {}),
    }
    case = build_case({"name": "own", "recipe": recipe})
    program = assemble_single(case.recipe, torch.device("cpu"), compute="float64")
    shown = Shown()
    train(case.recipe, program, shown)
    return shown, program.custom_step


@pytest.mark.parametrize("step", ["plain", "clips", "clips_some", "clips_by_hand"])
def test_gradients_are_shown_as_they_were_before_the_clip(step: str) -> None:
    # The loss is a mean over all tokens of the one micro-batch: the built-in loop's loss of the same model.
    wanted, _ = run(None)
    shown, _ = run(step, clip_norm=0.05)
    for name in ("0.weight", "1.weight", "1.bias"):
        expected = wanted.tensors[0, "gradient", name]
        torch.testing.assert_close(shown.tensors[0, "gradient", name], expected, rtol=1e-12, atol=1e-15)
    updates = [
        torch.equal(shown.tensors[0, "update", n], wanted.tensors[0, "update", n]) for n in ("1.weight",)
    ]
    assert updates == [step == "plain"]


def test_norm_and_coefficient_are_those_of_the_one_clip_or_what_is_returned() -> None:
    key = (0, "gradient_norm", "total")
    torchs, _ = run("clips", clip_norm=0.05)
    returned, _ = run("clips_by_hand", clip_norm=0.05)
    several, _ = run("clips_some", clip_norm=0.05)
    assert float(torchs.tensors[key]) == pytest.approx(float(returned.tensors[key]), rel=1e-12)
    assert (0, "gradient_norm", "clip_coefficient") in torchs.tensors
    assert key not in several.tensors
    assert float(returned.tensors[0, "loss", "total"]) == 1.5


def test_a_deprecated_clip_has_the_line_that_calls_it() -> None:
    with pytest.warns(FutureWarning, match="deprecated"):  # by a decorator of typing_extensions
        _, step = run("clips_as_before", clip_norm=0.05)
    assert step is not None
    sites = {call.site.partition(":")[0] for call in step.calls[0] if "clip" in call.name}
    assert sites == {"steps_of_mine.py"}


def test_a_schedule_is_stepped_by_the_step_that_takes_it_or_by_the_loop() -> None:
    own, _ = run("steps_schedule", schedule="linear")
    ours, _ = run("plain", schedule="linear")
    assert torch.equal(own.tensors[1, "update", "1.weight"], ours.tensors[1, "update", "1.weight"])


def test_gradients_that_are_added_to_are_noted_with_their_norm() -> None:
    shown, step = run("keeps")
    assert step is not None
    first, second = (next(call for call in step.calls[n] if call.name == "backward") for n in (0, 1))
    kept = torch.cat([shown.tensors[0, "gradient", n].flatten() for n in ("0.weight", "1.weight", "1.bias")])
    assert first.kept == 0.0
    assert second.kept == pytest.approx(float(kept.norm()), rel=1e-12)
    assert second.site.startswith("steps_of_mine.py:")


@pytest.mark.parametrize(
    ("step", "parts"),
    [
        ("never_steps", ("stepped the optimizer 0 times", "optimizer.step() once")),
        ("steps_twice", ("stepped the optimizer 2 times", "steps_of_mine.py:")),
        ("fails", ("RuntimeError", "out of patience", "in fails")),
        ("takes_two", ("cannot be called as step(model, optimizer, micro_batches)", "num_valid")),
        ("wants_more", ("tokenizer", "cannot be called")),
        ("misspells", ("`grad_norm`", "did you mean `gradient_norm`")),
        ("returns_text", ("str as `loss`", "return nothing, or a dict")),
        ("returns_list", ("returned list", "return nothing, or a dict")),
        ("not_there", ("has no `not_there`",)),
    ],
)
def test_a_step_that_cannot_be_run_is_refused_with_a_remedy(step: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(CaseError) as caught:
        run(step)
    (problem,) = caught.value.problems
    assert problem.path == "recipe.step"
    assert all(part in str(problem) for part in parts), str(problem)


def test_a_finish_that_nobody_would_call_is_refused() -> None:
    with pytest.raises(CaseError, match="takes no `finish`"):
        CustomStep("steps_of_mine:plain", finish=lambda: None)


def test_a_step_of_the_reference_model_is_refused() -> None:
    with pytest.raises(CaseError) as caught:
        build_case(
            {
                "name": "ours",
                "recipe": {"model": {"preset": "tiny-deepseek-v3"}, "step": "steps_of_mine:plain"},
            }
        )
    assert [problem.path for problem in caught.value.problems if problem.path == "recipe.step"]


def test_hooks_are_gone_after_a_step_that_failed() -> None:
    before = torch.autograd.backward
    model = nn.Linear(2, 2)
    step = CustomStep("steps_of_mine:fails")
    with pytest.raises(CaseError):
        step.run(0, model, torch.optim.SGD(model.parameters()), parameters(model), [])
    assert torch.autograd.backward is before
    assert StepTrace().gradients == []
