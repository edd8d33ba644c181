"""Files that would hang a careless reader or exhaust its memory: each is refused at once."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from moeverify.cases.validation.load import load_cases, load_valid_cases
from moeverify.errors import CaseError, Problem

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 12)
)
CHAIN = "a0: &a0 [x]\n" + "".join(f"a{level}: &a{level} [*a{level - 1}]\n" for level in range(1, 300))
GOOD = "recipe: {model: {preset: stress}}\nlayout: {dp_shard: 2}\n"


def write(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(text) and None


def make_circle(path: Path) -> None:
    path.symlink_to(path.name)


def make_circle_of_two(path: Path) -> None:
    path.symlink_to("other.link")
    (path.parent / "other.link").symlink_to(path.name)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(os.path.relpath(path))  # the path of a socket is short


def resize(fields: str) -> Callable[[Path], None]:
    return write(f"recipe: {{model: {{preset: stress, {fields}}}}}\nlayout: {{dp_shard: 2}}\n")


HOSTILE = {
    "bomb": (write(BOMB), "more than 2000 values, including repetitions by aliases"),
    "chain of aliases": (write(CHAIN), "nested too deeply: more than 50 levels"),
    "open brackets": (write("a: " + "[" * 30_000), "nested too deeply: more than 50 levels"),
    "open dashes": (write("- " * 30_000), "nested too deeply: more than 50 levels"),
    "values": (write("a: [" + "1," * 30_000 + "]"), "more than 2000 values"),
    "few open brackets": (write("a: " + "[" * 60), "nested too deeply"),
    "deep": (write("a: " + "[" * 60 + "]" * 60), "nested too deeply: more than 50 levels"),
    "large": (write("# " + "x" * 70_000), "larger than 64 KiB"),
    "pipe": (os.mkfifo, "a named pipe, and no regular file"),
    "socket": (make_socket, "No such device or address"),
    "zeros": (lambda path: path.symlink_to("/dev/zero"), "a device, and no regular file"),
    "terminal": (lambda path: path.symlink_to("/dev/tty"), ""),
    "circle of links": (make_circle, "Too many levels of symbolic links"),
    "circle of two": (make_circle_of_two, "Too many levels of symbolic links"),
    "link to nothing": (lambda path: path.symlink_to("nothing"), "there is no such file"),
    "folder": (Path.mkdir, "a folder, and no regular file"),
    "layers": (resize("num_layers: 1000000000"), "num_layers 1000000000 is above 10000"),
    "width": (resize("hidden: 100000000000"), "about 1e15 parameters"),
    "beyond floats": (resize(f"hidden: 1{'0' * 400}"), "beyond 64 bits"),
    "words": (resize("vocab_size: 3000000000"), "vocab_size 3000000000 is above 2147483647"),
    "name": (write(f"name: {'n' * 5000}\n{GOOD}"), "at most 100 letters"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", HOSTILE)
def test_refused_and_the_rest_of_the_folder_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make, message = HOSTILE[name]
    (tmp_path / "good.yaml").write_text(GOOD)
    make(tmp_path / "hostile.yaml")
    with pytest.raises(CaseError) as caught:
        load_cases([tmp_path])
    assert {problem.file for problem in caught.value.problems} == {str(tmp_path / "hostile.yaml")}
    assert message in caught.value.problems[0].message
    loaded = load_valid_cases([tmp_path])
    assert [case.name for case in loaded.cases] == ["good"]
    assert loaded.problems == caught.value.problems
    assert loaded.refused == [tmp_path / "hostile.yaml"]


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("data: {batch: 1000000, seq_len: 1000000}", "more than 1000000000 tokens"),
        ("steps: 1000000000", "steps 1000000000 is above 1000000"),
    ],
)
def test_runs_that_never_end(
    write: Callable[[str, str], Path], find_problems: Callable[..., list[Problem]], field: str, message: str
) -> None:
    [problem] = find_problems(write("a.yaml", f"recipe:\n  model: {{preset: stress}}\n  {field}\n"))
    assert message in problem.message
    assert problem.line == 3


def test_many_unknown_fields_take_no_long_time(
    write: Callable[[str, str], Path], find_problems: Callable[..., list[Problem]]
) -> None:
    text = "".join(f"field{number}: 1\n" for number in range(900))
    problems = find_problems(write("a.yaml", text))
    assert problems[-1].message == "and 880 more unknown fields"


def test_a_file_that_is_named_is_no_file_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(GOOD)
    (tmp_path / "bad.yaml").write_text(GOOD.replace("dp_shard", "dp_shart"))
    assert [case.name for case in load_valid_cases([tmp_path]).cases] == ["good"]
    for paths in ([tmp_path, tmp_path / "bad.yaml"], [tmp_path / "bad.yaml"]):
        with pytest.raises(CaseError, match="unknown field"):
            load_valid_cases(paths)


def test_nothing_runs_where_an_option_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(GOOD)
    (tmp_path / "other.yaml").write_text(GOOD.replace("dp_shard: 2", "dp_shard: 2, cp: 2"))
    for options in ({"overrides": ["layout.tq=2"]}, {"pattern": "(good"}, {"pattern": "neither"}):
        with pytest.raises(CaseError):
            load_valid_cases([tmp_path], **options)  # type: ignore[arg-type]


def test_of_two_cases_of_one_name_the_first_runs(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text(f"name: same\n{GOOD}")
    loaded = load_valid_cases([tmp_path])
    assert [case.file for case in loaded.cases] == [str(tmp_path / "a.yaml")]
    assert loaded.refused == [tmp_path / "b.yaml"]
