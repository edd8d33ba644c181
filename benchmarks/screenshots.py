"""Remake the screenshots of the docs: real runs, opened in a real headless browser.

python benchmarks/screenshots.py      # needs Chromium or Chrome, and two minutes on two cores

The page of a failure is shown in the light color scheme, the picture of a hang in the dark one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal, NamedTuple

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
)
NUM_COLORS = 16  # enough for text and boxes, and a quarter of the bytes
SCHEMES = {"dark": 0, "light": 1}  # as Blink numbers them

FAULT = "moeverify.faults.catalogue.expert_gradients.a05_fsdp2_expert_divisor:inject"
# A missing rank: it sleeps where it should send its tokens to the experts.
HANG = """\
import time
import torch.distributed as dist
from moeverify.parallel.collectives import exchange_rows

def stay_away(patch):
    @patch.wrap(exchange_rows)
    def sleep(original, *arguments, **named):
        if dist.get_rank() == 2:
            time.sleep(600)
        return original(*arguments, **named)
"""
RUNS = {
    "mismatch": ("cases/fsdp2-ep2.yaml", "--fault", FAULT),
    "hang": ("cases/fsdp2-ep2.yaml", "--fault", "missing_rank:stay_away", "--set", "checks.timeout=20"),
}


class Shot(NamedTuple):
    """A picture of the docs: its page, one figure of it (or its top), and its color scheme. Units: pixels."""

    name: str
    run: str
    figures: tuple[str, ...]
    scheme: Literal["light", "dark"]
    width: int
    height: int


SHOTS = (
    Shot("report-page", "mismatch", (), "light", 1180, 480),
    Shot("report-hang", "hang", ("last-collectives",), "dark", 1000, 440),
)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        pages = {name: make_page(words, Path(scratch) / f"{name}.html") for name, words in RUNS.items()}
        for shot in SHOTS:
            path = IMAGES / f"{shot.name}.webp"
            take(pages[shot.run], path, shot)
            sys.stdout.write(f"{path}: {path.stat().st_size} bytes\n")


def make_page(words: tuple[str, ...], page: Path) -> Path:
    """Return the page that a run has written."""
    (page.parent / "missing_rank.py").write_text(HANG)
    path = os.pathsep.join([str(ROOT), str(page.parent)])
    variables = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "moeverify", "run", *words, "--html", str(page)]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    if not page.is_file():
        raise SystemExit(f"{' '.join(command)} wrote no page:\n{done.stdout}{done.stderr}")
    return page


def take(page: Path, path: Path, shot: Shot) -> None:
    """Write a browser's rendering of a page as PNG or lossless WebP with few colors."""
    browser = find_browser()
    if browser is None:
        raise SystemExit(f"needs a browser: one of {', '.join(BROWSERS)}")
    with tempfile.TemporaryDirectory() as scratch:
        raw, shown = Path(scratch) / "raw.png", Path(scratch) / "page.html"
        shown.write_text(
            page.read_text()
            .replace(f"{page.parent}/", "")
            .replace("</style>", f"{hide_others(shot.figures)}</style>", 1)
        )
        options = (
            f"--user-data-dir={scratch}/profile",
            f"--window-size={shot.width},{shot.height}",
            f"--blink-settings=preferredColorScheme={SCHEMES[shot.scheme]}",
            f"--screenshot={raw}",
        )
        command = [browser, *FLAGS, *options, shown.as_uri()]
        subprocess.run(command, capture_output=True, check=True, timeout=240)
        with Image.open(raw) as image:
            colors = image.convert("RGB").quantize(NUM_COLORS, dither=Image.Dither.NONE)
            colors.save(path, optimize=True, lossless=True, quality=100, method=6)


def find_browser() -> str | None:
    """Return the path of the first browser that is installed."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def hide_others(figures: tuple[str, ...]) -> str:
    """Return a style that shows only these figures of the first case; a browser captures the top only."""
    if not figures:
        return ""
    kept = "".join(f":not(#case-1-{name})" for name in figures)
    others = f"header, footer, main > :not(#case-1), #case-1 > :not(.pictures), figure{kept}"
    return f"{others} {{ display: none }} section.case {{ border: 0; margin: 0 }}"


if __name__ == "__main__":
    main()
