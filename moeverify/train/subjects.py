"""The available subjects, by the schema section that describes the model."""

from __future__ import annotations

from moeverify.cases.schema import CustomModel, Recipe, ReferenceModel
from moeverify.train.custom_subject import CustomSubject
from moeverify.train.reference_subject import ReferenceSubject
from moeverify.train.subject import TestedModel


def subject_of(recipe: Recipe) -> TestedModel:
    """Return the model under test of a recipe."""
    match recipe.model:
        case ReferenceModel() as model:
            return ReferenceSubject(recipe, model)
        case CustomModel() as model:
            return CustomSubject(recipe, model)


def replays_routing(recipe: Recipe) -> bool:
    """Return whether runs replay the golden's routing: rounding could otherwise change a token's experts."""
    return recipe.precision != "float64" and subject_of(recipe).can_replay
