"""A run as JSON, written by `--json` and read by later commands."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from moeverify.errors import FormatError
from moeverify.input_file import parse_json, read_input, read_problem
from moeverify.report.files import write_atomically
from moeverify.report.numbers import format_count
from moeverify.report.words.run import word_run
from moeverify.results.run import SCHEMA_VERSION, RunResult

RUN_FILE = "result.json"


def format_json(run: RunResult) -> str:
    """Return the run, including its words, as indented JSON.

    Non-finite numbers are the strings "NaN", "Infinity" and "-Infinity".
    """
    return word_run(run).model_dump_json(indent=2) + "\n"


def write(run: RunResult, path: Path) -> None:
    """Write the run's JSON to `path` atomically.

    Raises: OSError when writing fails.
    """
    write_atomically(path, format_json(run))


def find_run_file(path: Path) -> Path:
    """Return the JSON file of a run, given its folder or the file itself."""
    return path / RUN_FILE if path.is_dir() else path


def read_run(path: Path) -> RunResult:
    """Return the run stored in a folder made by `--out`, or in a file written by `--json`.

    Raises: FormatError if the file is missing, incomplete, of another version, or not a run.
    """
    file = find_run_file(path)
    if path.is_dir() and not file.exists():
        raise FormatError(f"{path} holds no {RUN_FILE}; name a folder that `moeverify run --out` made")
    try:
        content = parse_json(read_input(file).decode("utf-8"))
    except FileNotFoundError:
        raise FormatError(
            f"{file} does not exist; `moeverify run CASE --out DIR` makes a run folder"
        ) from None
    except OSError as error:
        raise FormatError(f"{file} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise FormatError(f"{file} is not text; name what `moeverify run --json` wrote") from error
    except json.JSONDecodeError as error:
        what = "empty" if not error.doc.strip() else "not JSON, or was cut off"
        place = f"line {error.lineno} column {error.colno}"
        raise FormatError(f"{file} is {what} ({place}: {error.msg}); run the cases again") from error
    _check_version(content, file)
    try:
        # Findings of version 1 contain words without data, which all reports can handle.
        return RunResult.model_validate({**content, "schema_version": SCHEMA_VERSION})
    except ValidationError as error:
        wrong = f"{format_count(error.error_count(), 'wrong field')}, first {': '.join(read_problem(error))}"
        raise FormatError(f"{file} does not hold a run ({wrong}); run the cases again") from error


def _check_version(content: object, file: Path) -> None:
    """Raise FormatError unless the content is a run of a supported version."""
    if not isinstance(content, dict) or "schema_version" not in content:
        raise FormatError(f"{file} is JSON but no run of moeverify; name what `moeverify run --json` wrote")
    version = content["schema_version"]
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise FormatError(
            f"{file} has the schema version {version!r}, which no moeverify wrote; run the cases again"
        )
    if version > SCHEMA_VERSION:
        raise FormatError(
            f"{file} has schema version {version}, this moeverify reads 1 to {SCHEMA_VERSION}; "
            "upgrade moeverify, or run the cases again with this one"
        )
