"""A run as JSON, written by `--json` and read by later commands."""

from __future__ import annotations

from pathlib import Path

from moeverify.checksum import seal
from moeverify.errors import FormatError
from moeverify.json_file import JsonFile
from moeverify.report.files import write_atomically
from moeverify.report.words.run import word_run
from moeverify.results.run import SCHEMA_VERSION, RunResult

RUN_FILE = "result.json"
_SEALED_SINCE = 3  # files of older versions have no checksum


def format_json(run: RunResult) -> str:
    """Return the run, including its words, as indented JSON.

    Non-finite numbers are the strings "NaN", "Infinity" and "-Infinity". The last key is a checksum.
    """
    return seal(word_run(run).model_dump_json(indent=2))


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
    remedy = "run the cases again, or name the output of `moeverify run --out` or `--json`"
    document = JsonFile.read(file, remedy)
    version = _check_version(document)
    if version >= _SEALED_SINCE:
        document.require_seal()
    # Findings of version 1 contain words without data, which all reports can handle.
    return document.build(RunResult, schema_version=SCHEMA_VERSION)


def _check_version(document: JsonFile) -> int:
    """Return the version of a run.

    Raises: FormatError unless the content is a run of a supported version.
    """
    content = document.content
    if not isinstance(content, dict) or "schema_version" not in content:
        document.refuse("it is JSON but no run of moeverify")
    if "exit_code" in content:
        document.refuse(f"`moeverify {content.get('command')}` ended before it had a run")
    version = content["schema_version"]
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        document.refuse(f"version {version!r}, which no moeverify wrote", "schema_version")
    if version > SCHEMA_VERSION:
        document.refuse(
            f"version {version}, this moeverify reads 1 to {SCHEMA_VERSION}; upgrade moeverify",
            "schema_version",
        )
    return version
