"""config.json of Hugging Face and the schema of cases: the same values of every enumeration, both ways."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

import pytest
from folders import HF_PRESETS, make_spec

from moeverify.cases.schema import MoE, ReferenceModel
from moeverify.errors import FormatError
from moeverify.tools.weights.families import FAMILIES, WORDS, find_family, read_config, write_config

ENUMERATIONS: dict[str, tuple[str, ...]] = {
    prefix + name: get_args(field.annotation)
    for prefix, schema in (("", ReferenceModel), ("moe.", MoE))
    for name, field in schema.model_fields.items()
    if get_origin(field.annotation) is Literal
}
TRAINING = {"moe.balance_scope"}  # decides the loss and no weights


def change(model: ReferenceModel, path: str, value: str) -> ReferenceModel:
    content = model.model_dump()
    section, _, name = path.rpartition(".")
    (content[section] if section else content)[name] = value
    return ReferenceModel.model_validate(content)


@pytest.mark.parametrize("preset", HF_PRESETS)
def test_every_value_of_an_enumeration_comes_back_or_is_named(preset: str) -> None:
    for path, values in ENUMERATIONS.items():
        held = {family.get_constant(path) for family in FAMILIES.values()}
        for value in values:
            model = change(make_spec(preset), path, value)
            refusal, back = write_and_read(model)
            if back is None:  # the nearest family may have the value, and differ in another field
                assert path in refusal or (value in held and "which differs in " in refusal)
            elif path not in TRAINING and _matters(model, path):
                assert change(back, path, value) == back, path


def write_and_read(model: ReferenceModel) -> tuple[str, ReferenceModel | None]:
    try:
        family = find_family(model)
    except FormatError as error:
        return str(error), None
    return "", read_config(write_config(family, model, "float32"), "config.json")[1]


def _matters(model: ReferenceModel, path: str) -> bool:
    assert model.moe is not None
    is_used = {
        "attention_bias_scope": model.attention_bias,
        "qk_norm_scope": model.qk_norm,
        "moe.group_score": model.moe.num_groups > model.moe.top_groups,
    }
    return is_used.get(path, True)


@pytest.mark.parametrize("key", WORDS)
def test_words_mean_values_of_the_schema_and_others_are_refused_by_name(key: str) -> None:
    path, words = WORDS[key]
    assert set(words.values()) <= set(ENUMERATIONS[path])
    for family in FAMILIES.values():
        if key not in family.words:
            continue
        others: tuple[Any, ...] = ("another", 3, ["silu"])
        for word in (*words, *others):
            config = {"model_type": family.model_type, key: word}
            with pytest.raises(FormatError) as caught:  # at the latest of the sizes, which are missing
                read_config(config, "config.json")
            is_right = isinstance(word, str) and words.get(word) == family.get_constant(path)
            assert str(caught.value).startswith(f"config.json: {key} is {word!r}") != is_right
            assert is_right or family.spell(key) in str(caught.value)
