"""Every way in which a file can be unreadable."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

GOOD = "recipe: {model: {preset: stress}}\n"


@pytest.mark.parametrize(
    ("text", "line", "path", "message", "remedy"),
    [
        ("", None, "", "this file is empty", "write `recipe:` and `layout:`"),
        ("# nothing\n", None, "", "this file is empty", "write"),
        (
            "# a list\n- recipe\n",
            2,
            "",
            "expected a mapping of fields, got a list",
            "write `name: value` lines",
        ),
        ("recipe\n", 1, "", "expected a mapping of fields, got a single value", "write `name: value` lines"),
        ("recipe:\n\tmodel: 1\n", 2, "", "a tab cannot indent YAML", "use spaces"),
        ("recipe: [1\nlayout: 2\n", 2, "", "broken YAML: expected ',' or ']'", "write `name: value`"),
        ("recipe: {a: 1\n", 2, "", "the text ends too early", "close every bracket"),
        ("description: a: b\n", 1, "", "a second `:` in one value", "put the value in quotes"),
        (GOOD + "---\n" + GOOD, 2, "", "a second document begins here", "write one case a file"),
        ("recipe: *there\n", 1, "", "found undefined alias 'there'", ""),
        ("recipe: 1\nname: \x07\n", 2, "", "a control character U+0007", "delete it"),
        (
            "layout:\n  tp: 2\n  cp: 1\n  tp: 1\n",
            4,
            "layout.tp",
            "given twice (first on line 2)",
            "delete one",
        ),
        ("a: &x 1\nb:\n  <<: {tp: 1}\n", 3, "b.<<", "merge keys are not supported", "use `base:`"),
        ("? [a]\n: 1\n", 1, "", "a field's name must be text", "write `name: value`"),
        ("layout: &a\n  tp: *a\n", 2, "layout.tp", "this alias contains itself", "write the value out"),
        ("name: !!python/name:os.system x\n", 1, "name", "YAML type `python/name:os.system`", "in quotes"),
        ("name: 2026-01-01\n", 1, "name", "the YAML type `timestamp` is not supported", "in quotes"),
        ("name: !!int two\n", 1, "name", "`two` cannot be read as `int`", ""),
        ("a: " + "[" * 3000 + "]" * 3000 + "\n", None, "", "this is nested too deeply", ""),
    ],
)
def test_unreadable_text(write, find_problems, *, text, line, path, message, remedy):
    file = write("case.yaml", "")
    file.write_text(text, encoding="utf-8")
    found = [
        problem
        for problem in find_problems(file)
        if (problem.line, problem.path) == (line, path) and message in problem.message
    ]
    assert len(found) == 1
    assert found[0].file == str(file)
    assert remedy in found[0].remedy


def test_bytes_that_are_not_utf8(tmp_path: Path, find_problems):
    file = tmp_path / "case.yaml"
    file.write_bytes(b"name: a\ndescription: caf\xe9\n")
    [problem] = find_problems(file)
    assert str(problem) == f"{file}:2: this file is not UTF-8 text (byte 0xe9); save it as UTF-8"


def test_byte_order_mark_and_crlf_are_read(tmp_path: Path, find_problems):
    file = tmp_path / "case.yaml"
    file.write_bytes(b"\xef\xbb\xbfrecipe: {model: {preset: stress}}\r\nlayout: {tq: 1}\r\n")
    [problem] = find_problems(file)
    assert (problem.line, problem.path) == (2, "layout.tq")


def test_reused_anchor_is_no_warning(write, find_problems):
    text = "recipe: {model: {preset: stress}}\nname: &a x1\ndescription: &a y\n"
    assert find_problems(write("case.yaml", text)) == []


def test_missing_file_names_the_nearest(write, find_problems, tmp_path: Path):
    write("fsdp2.yaml", GOOD)
    [problem] = find_problems(tmp_path / "fdsp2.yaml")
    assert problem.message == "there is no such file"
    assert problem.file == str(tmp_path / "fdsp2.yaml")
    assert problem.remedy == f"did you mean `{tmp_path / 'fsdp2.yaml'}`?"


def test_unrelated_file_is_not_suggested(write, find_problems, tmp_path: Path):
    write("fsdp2.yaml", GOOD)
    [problem] = find_problems(tmp_path / "qqq.yaml")
    assert "did you mean" not in problem.remedy
    assert "path" in problem.remedy


def test_a_program_is_refused_with_the_commands_for_it(write, find_problems):
    [problem] = find_problems(write("train.py", "import torch\n"))
    assert "is a program" in problem.message
    assert "moeverify init" in problem.remedy
    assert "moeverify watch" in problem.remedy


def test_folder_without_cases(find_problems, tmp_path: Path):
    [problem] = find_problems(tmp_path)
    assert (problem.file, problem.message) == (str(tmp_path), "there is no case in this folder")


def test_folder_with_other_suffix(write, find_problems, tmp_path: Path):
    write("a.yml", GOOD)
    [problem] = find_problems(tmp_path)
    assert problem.remedy == "rename `.yml` files to `.yaml`"


def test_no_path_at_all(find_problems):
    [problem] = find_problems()
    assert problem.message == "no case was given"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_file_without_permission(write, find_problems):
    file = write("case.yaml", GOOD)
    file.chmod(0)
    [problem] = find_problems(file)
    assert "Permission denied" in problem.message


def test_folder_named_like_a_case(tmp_path: Path, write, find_problems):
    write("a.yaml", GOOD)
    (tmp_path / "b.yaml").mkdir()
    [problem] = find_problems(tmp_path)
    assert problem.file == str(tmp_path / "b.yaml")
    assert "cannot be read" in problem.message


def test_a_broken_recipe_is_refused_for_each_case_that_stands_on_it(write, find_problems):
    recipe = write("recipes/odd.yaml", "model: {preset: stress}\nmodel: {preset: stress}\n")
    for name in ("one", "two"):
        (problem,) = find_problems(write(f"{name}.yaml", "recipe: odd\nlayout: {dp_shard: 2}\n"))
        assert (problem.file, problem.line, problem.path) == (str(recipe), 2, "model")


def test_a_recipe_that_was_mended_is_read_anew(write, find_problems):
    recipe = write("recipes/odd.yaml", "model: {preset: stress}\nmodel: {preset: stress}\n")
    case = write("one.yaml", "recipe: odd\nlayout: {dp_shard: 2}\n")
    assert [problem.file for problem in find_problems(case)] == [str(recipe)]
    recipe.write_text("model: {preset: stress}\n")
    assert str(recipe) not in [problem.file for problem in find_problems(case)]
