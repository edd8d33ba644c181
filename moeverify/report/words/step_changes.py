"""Words for what of an optimizer's formula is made otherwise."""

from __future__ import annotations

from collections.abc import Mapping

from moeverify.results.step_facts import StepChange, StepForm

_CHANGES: Mapping[StepChange, str] = {
    "epsilon-before-correction": "epsilon is added before the second moment's bias correction",
    "epsilon-in-root": "epsilon is added inside of the root",
    "epsilon-squared-in-root": "the square of epsilon is added inside of the root",
    "epsilon-as-floor": "epsilon is the least value of the root, and is not added to it",
    "no-epsilon": "epsilon is left out",
    "other-epsilon": "with an epsilon of {:.5g}",
    "no-correction": "the moments' bias corrections are left out",
    "no-first-correction": "the first moment's bias correction is left out",
    "no-second-correction": "the second moment's bias correction is left out",
    "multiplied-by-corrections": "the moments are multiplied by their bias corrections, not divided by them",
    "root-of-first-correction": "the first moment is divided by the root of its bias correction",
    "second-correction-without-root": (
        "the root of the second moment is divided by the bias correction, not by the correction's root"
    ),
    "corrected-for-next-step": "the bias corrections are those of the next step",
    "corrected-for-step-before": "the bias corrections are those of the step before",
    "first-corrected-for-step-before": "the first moment's bias correction is that of the step before",
    "second-corrected-for-step-before": "the second moment's bias correction is that of the step before",
    "corrected-for-first-step": "the bias corrections are those of the first step",
    "first-corrected-for-first-step": "the first moment's bias correction is that of the first step",
    "second-corrected-for-first-step": "the second moment's bias correction is that of the first step",
    "corrected-for-other-step": "the bias corrections are those of another step, by a counter that is not its own",
    "corrected-with-bfloat16-betas": "the bias corrections are those of betas rounded to bfloat16",
    "corrected-with-swapped-betas": "the bias corrections are those of each other's beta",
    "corrected-with-first-beta": "both bias corrections are those of the first beta",
    "corrected-with-second-beta": "both bias corrections are those of the second beta",
    "no-root": "the second moment's root is not taken",
    "fourth-root": "the fourth root of the second moment is taken",
    "undivided": "the step is not divided by the root of the second moment",
    "sign-of-step": "of the step only its sign is taken",
    "bounded-step": "each element of the step is cut off at {:.5g} times the learning rate",
    "masked-by-gradient": "elements whose step and gradient have opposite signs stay as they are",
    "old-mean": "the step is made of the momentum of before it",
    "gradient-for-mean": "the step is made of the gradient alone, not of its momentum",
    "nesterov": "the momentum is Nesterov's",
    "nesterov-corrected-ahead": "the momentum is Nesterov's, with the bias correction of the next step",
    "old-square": "the second moment is that of before the step",
    "squared-gradient-for-square": "the squared gradient stands in the place of the second moment",
    "largest-square": "the second moment is the largest of all steps, as with AMSGrad",
    "no-decay": "weight decay is left out",
    "decay-reversed": "weight decay is added to the weight, not taken from it",
    "decay-with-corrections": "the weight decay is multiplied by the moments' bias corrections",
    "decay-without-rate": "the weight decay is not multiplied by the learning rate",
    "decay-by-squared-rate": "the weight decay is multiplied by the learning rate twice",
    "decay-after-step": "the weight decay is taken from the weight after its step, not before it",
    "decay-of-step-alone": "the weight decay is taken of the step, not of the weight",
    "decay-at-weight": "weight decay is taken from the weight itself, as with decoupled decay",
    "step-without-rate": "the step is not multiplied by the learning rate",
    "step-by-squared-rate": "the step is multiplied by the learning rate twice",
    "decay-in-gradient": "weight decay is added to the gradient, as with L2 regularization",
    "decay-against-gradient": "weight decay is taken from the gradient, not added to it",
    "no-decay-in-gradient": "weight decay is left out of the gradient",
    "constant-in-gradient": "a constant is added to the gradient, {:.5g} here",
    "constant-for-decay": "a constant is added to the gradient in the place of weight decay, {:.5g} here",
    "sign-of-gradient": "of the gradient only its sign is taken",
    "gradient-times-rate": "the gradient is multiplied by the learning rate",
    "not-clipped": "the gradient is not clipped",
    "clipped-by-value": "each element of the gradient is cut off at the limit of the clip, which is one of its norm",
    "clipped-again": "the gradient is clipped twice",
    "not-squared": "the gradient is not squared",
    "root-of-gradient": "the root of the gradient is taken",
    "square-of-difference": "the square is that of the gradient less its new mean, as with AdaBelief",
    "square-of-old-difference": "the square is that of the gradient less its old mean",
    "square-of-mean": "the square is that of the gradient's mean, not of the gradient",
    "other-share": "what the step adds counts {:.5g} times",
    "other-beta": "with a beta of {:.5g}",
    "other-kept": "the moment of before counts {:.5g} times",
    "undecayed": "the moment of before is not multiplied by its beta",
    "largest": "it is the larger of the moment of before and of what the step adds, not their sum",
    "epsilon-in-moment": "epsilon is added to the moment itself",
    "starts-at-weight": "it starts from the weight, not from zero",
    "starts-at-number": "each element starts from {:.5g}, not from zero",
    "starts-twice": "it starts from the gradient, to which the first step adds the gradient again",
    "starts-dampened": "the first gradient is multiplied by 1 - momentum, and those of later steps are not",
}


def describe_form(form: StepForm) -> str:
    """Return what is otherwise in a formula that has these changes, with the number that it was solved for."""
    return " and ".join(_CHANGES[each].format(form.number) for each in form.changes)
