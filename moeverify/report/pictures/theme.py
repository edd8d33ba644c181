"""The colours of pages and pictures, each as a (light, dark) pair."""

from __future__ import annotations

PALETTE: dict[str, tuple[str, str]] = {
    "text": ("#1b1f24", "#e3e6ea"),
    "dim": ("#5b6470", "#9aa4b0"),
    "line": ("#d6dae0", "#363c44"),
    "soft": ("#f3f5f8", "#1f242b"),
    "back": ("#ffffff", "#14171b"),
    "pass": ("#17692f", "#63c67f"),
    "mismatch": ("#b3161c", "#ff7b7b"),
    "error": ("#86198f", "#e08be8"),
    "skipped": ("#7a5b00", "#dcb541"),
    "expected": ("#b98a1d", "#d8b255"),
    "actual": ("#1f5fbf", "#74aaff"),
    "guilty": ("#6b2fb5", "#bf95ff"),
    # Levels of error / bound, from within the bound to not finite. Text is legible on the first four.
    "heat-0": ("#d9ecdd", "#1d3626"),
    "heat-1": ("#fdf0c4", "#453a17"),
    "heat-2": ("#fcd382", "#664812"),
    "heat-3": ("#f3a05a", "#8a4c17"),
    "heat-4": ("#dc5b47", "#dd6a57"),
    "heat-5": ("#a91d3a", "#f78c98"),
    "heat-6": ("#4a0f3d", "#f3c6ee"),
    # Series shown side by side, such as ranks.
    "part-0": ("#3b74c4", "#6ea3ee"),
    "part-1": ("#e0a03a", "#e9b55f"),
    "part-2": ("#4c9f70", "#72c596"),
    "part-3": ("#a85cad", "#cb8ed0"),
    "part-4": ("#c9624b", "#e68c77"),
    "part-5": ("#58a7b5", "#82c9d5"),
    "part-6": ("#8b8f3a", "#b9bd66"),
    "part-7": ("#7c6f64", "#ab9e92"),
}

COLORS: dict[str, str] = {name: light for name, (light, _) in PALETTE.items()}
"""The colours of drawn pictures; in pages, CSS variables replace them."""


def format_variables() -> str:
    """Return the colours as CSS custom properties, for light and dark backgrounds."""
    light, dark = (
        " ".join(f"--{name}: {pair[number]};" for name, pair in PALETTE.items()) for number in (0, 1)
    )
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
        f"@media print {{ :root {{ color-scheme: light; {light} }} }}"
    )
