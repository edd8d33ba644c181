"""Remake the screenshots of the docs: real runs, opened in a real headless browser.

    apt-get install chromium              # or any other Chromium or Chrome
    pip install axe-core-python           # for --audit: the rules of axe-core
    python benchmarks/screenshots.py      # two minutes on two cores
    python benchmarks/screenshots.py --audit PAGE...    # violations of the rules of accessibility in pages

Each page is audited in both color schemes, with its tables and details open.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from html import unescape
from pathlib import Path
from typing import Any, Literal, NamedTuple

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
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
)
NUM_COLORS = 32  # enough for text and boxes, and a quarter of the bytes
SCHEMES = {"dark": 0, "light": 1}  # as Blink numbers them

Scheme = Literal["light", "dark"]

# Colors inside pictures are not decided by axe; a test compares those of the palette.
AUDIT = """
for (const each of document.querySelectorAll("details")) each.open = true;
setTimeout(() => axe.run().then(({violations}) => {
  document.body.dataset.audit = JSON.stringify(violations.map(
    ({id, help, nodes}) => `${id}: ${help}: ${nodes.slice(0, 3).map((node) => node.html.slice(0, 120)).join(" ")}`));
}), 200);
"""

FAULT = "A05"
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
    scheme: Scheme
    width: int
    height: int


SHOTS = (
    Shot("report-page", "mismatch", (), "light", 1180, 740),
    Shot("report-page-dark", "mismatch", (), "dark", 1180, 740),
    Shot("report-hang", "hang", ("last-collectives",), "dark", 1000, 440),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--audit", nargs="+", type=Path, metavar="PAGE", help="HTML pages to audit")
    pages = parser.parse_args().audit
    if pages:
        found = [line for page in pages for scheme in SCHEMES for line in audit(page.read_text(), scheme)]
        raise SystemExit("\n".join(found) or 0)
    with tempfile.TemporaryDirectory() as scratch:
        made = {name: make_page(words, Path(scratch) / f"{name}.html") for name, words in RUNS.items()}
        for shot in SHOTS:
            path = IMAGES / f"{shot.name}.webp"
            take(made[shot.run], path, shot)
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
    with tempfile.TemporaryDirectory() as scratch:
        raw = Path(scratch) / "raw.png"
        text = page.read_text().replace(f"{page.parent}/", "")
        browse(
            text.replace("</style>", f"{hide_others(shot.figures)}</style>", 1),
            f"--window-size={shot.width},{shot.height}",
            f"--screenshot={raw}",
            scheme=shot.scheme,
        )
        with Image.open(raw) as image:
            colors = image.convert("RGB").quantize(NUM_COLORS, dither=Image.Dither.NONE)
            colors.save(path, optimize=True, lossless=True, quality=100, method=6)


def browse(page: str, *options: str, scheme: Scheme = "light") -> subprocess.CompletedProcess[str]:
    """Open the text of a page in a browser and return what the browser printed."""
    with tempfile.TemporaryDirectory() as scratch:
        shown = Path(scratch) / "page.html"
        shown.write_text(page, encoding="utf-8")
        return visit(shown.as_uri(), *options, scheme=scheme)


def visit(address: str, *options: str, scheme: Scheme = "light") -> subprocess.CompletedProcess[str]:
    """Open an address in a browser and return what the browser printed."""
    browser = find_browser()
    if browser is None:
        raise SystemExit(f"needs a browser: one of {', '.join(BROWSERS)}")
    with tempfile.TemporaryDirectory() as scratch:
        own = (
            f"--user-data-dir={scratch}/profile",
            f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
        )
        return subprocess.run(
            [browser, *FLAGS, *own, *options, address],
            capture_output=True,
            text=True,
            check=True,
            timeout=240,
        )


def dump(page: str, *, scheme: Scheme = "light") -> tuple[str, list[str]]:
    """Return the elements of a page after its script has run, and the lines of its console."""
    done = browse(page, "--virtual-time-budget=3000", "--dump-dom", scheme=scheme)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def add_script(page: str, code: str) -> str:
    """Return a page whose only script has more to do, with the hash that lets it run."""
    script = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)[-1]
    longer = script + code
    digests = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in (script, longer)]
    return page.replace(script, longer).replace(*digests)


def audit(page: str, scheme: Scheme) -> list[str]:
    """Return the violations of axe-core in a page, with the first elements of each."""
    rules = find_rules()
    if rules is None:
        raise SystemExit("needs axe-core-python")
    elements, console = dump(add_script(page, f";\n{rules.read_text()}\n{AUDIT}"), scheme=scheme)
    answer = re.search(r'data-audit="([^"]*)"', elements)
    if answer is None:
        raise SystemExit(f"axe-core gave no answer: {console[:3]}")
    found: Any = json.loads(unescape(answer[1]))
    return [f"{scheme}: {line}" for line in found]


def find_rules() -> Path | None:
    """Return the script of axe-core in the Python package, if that is installed."""
    spec = importlib.util.find_spec("axe_core_python")
    return Path(spec.origin).with_name("axe.min.js") if spec is not None and spec.origin else None


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
