"""A picture, and its output as an SVG element of a page or as PNG."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from xml.etree import ElementTree as ET

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from moeverify.report.pictures.theme import COLORS

_SVG = "http://www.w3.org/2000/svg"
_XLINK = "http://www.w3.org/1999/xlink"
_STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # the only font that ships with matplotlib
    "font.size": 9,
    "text.color": COLORS["text"],
    "text.parse_math": False,  # a name with two dollar signs is not a formula
    "axes.edgecolor": COLORS["line"],
    "axes.labelcolor": COLORS["dim"],
    "axes.titlecolor": COLORS["text"],
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": COLORS["line"],
    "grid.linewidth": 0.5,
    "xtick.color": COLORS["line"],
    "ytick.color": COLORS["line"],
    "xtick.labelcolor": COLORS["dim"],
    "ytick.labelcolor": COLORS["dim"],
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.facecolor": COLORS["back"],
    "savefig.facecolor": COLORS["back"],
    "svg.fonttype": "none",  # keep text as text: searchable, accessible and scalable
    "svg.hashsalt": "moeverify",  # makes the output deterministic
}
_MOST_PIXELS = 4000
_DPI = 150


@dataclass(frozen=True)
class Picture:
    """A figure with its title and a caption that gives its content to readers who cannot see it."""

    title: str
    caption: str
    figure: Figure


@contextmanager
def drawing() -> Iterator[None]:
    """Apply the style of reports regardless of matplotlibrc, and suppress warnings about missing glyphs."""
    with mpl.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        yield


def make_figure(width: float, height: float) -> Figure:
    """Return an empty figure; the sizes are in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def clear_frame(axes: Axes) -> None:
    """Remove ticks and lines around a drawing that is not a graph."""
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)


def scale_by_powers(axes: Axes, name: Literal["x", "y"]) -> None:
    """Make one axis logarithmic, with labelled major ticks and no minor ticks."""
    axes.set(**{f"{name}scale": "log"})
    axis = axes.xaxis if name == "x" else axes.yaxis
    axis.set_major_formatter(format_power)
    axis.set_minor_locator(NullLocator())


def format_power(value: float, _position: float | None = None) -> str:
    """Return the label of a tick on a logarithmic axis."""
    return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e").replace("1e0", "1")


def format_png(picture: Picture) -> bytes:
    """Return the picture as PNG on a white background, with title and caption as metadata."""
    data = io.BytesIO()
    dpi = min(_DPI, _MOST_PIXELS / max(*picture.figure.get_size_inches()))
    about = {"Title": _to_latin(picture.title), "Description": _to_latin(picture.caption), "Software": None}
    with drawing():
        picture.figure.savefig(data, format="png", dpi=dpi, metadata=about)
    return data.getvalue()


def _to_latin(text: str) -> str:
    return text.encode("latin-1", "replace").decode("latin-1")


def format_svg(picture: Picture, name: str) -> str:
    """Return the picture as an `svg` element for a page; all of its ids begin with `name`.

    It uses the colour variables of the page. It has no fixed size and fills the available width.
    """
    data = io.BytesIO()
    absent = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with drawing():
        picture.figure.savefig(data, format="svg", transparent=True, metadata=absent)
    root = ET.fromstring(data.getvalue())
    for metadata in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(metadata)
    del root.attrib["width"], root.attrib["height"]
    root.attrib.update({"role": "img", "aria-labelledby": f"{name}-title {name}-desc"})
    for position, (tag, text) in enumerate((("title", picture.title), ("desc", picture.caption))):
        element = ET.Element(f"{{{_SVG}}}{tag}", {"id": f"{name}-{tag}"})
        element.text = text
        root.insert(position, element)
    ET.register_namespace("", _SVG)
    ET.register_namespace("xlink", _XLINK)
    text = re.sub(r">\s+<", "><", ET.tostring(root, encoding="unicode"))
    return _name_ids(_name_colors(text), name)


def _name_colors(text: str) -> str:
    """Return an SVG with the page's colour variables in its styles, without fonts, and with rounded coordinates."""
    names = {value: name for name, value in COLORS.items()}
    styles = re.compile(r'(?<= style=")[^"]*')

    def name_in_style(match: re.Match[str]) -> str:
        return re.sub(
            r"#[0-9a-f]{6}",
            lambda color: f"var(--{names[color[0]]})" if color[0] in names else color[0],
            re.sub(r" ?font-family: [^;]*;", "", match[0]),
        )

    def shorten(match: re.Match[str]) -> str:
        return re.sub(r"-?\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", match[0])

    return re.sub(r' (?:d|x|y|transform)="[^"]*', shorten, styles.sub(name_in_style, text))


def _name_ids(text: str, name: str) -> str:
    """Return an SVG whose ids are unique within the page; unreferenced ids are removed."""
    used = set(re.findall(r'(?:url\(#|xlink:href="#)([^)"]+)', text)) | {f"{name}-title", f"{name}-desc"}

    def rename(match: re.Match[str]) -> str:
        own = match[1]
        if own not in used:
            return ""
        return match[0] if own.startswith(f"{name}-") else f' id="{name}-{own}"'

    text = re.sub(r' id="([^"]*)"', rename, text)
    return re.sub(r'(url\(#|xlink:href="#)(?=[^)"])', rf"\g<1>{name}-", text)
