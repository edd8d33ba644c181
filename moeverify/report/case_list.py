"""Console table of the cases that were read, printed before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from moeverify.cases.schema import MoE, Recipe
from moeverify.report.console import new_table, print_lines, print_table
from moeverify.report.numbers import format_count
from moeverify.report.sanitize import clean
from moeverify.results.listed import CheckedCase


def render_catalog(lines: Sequence[CheckedCase], console: Console) -> None:
    """Print the name, number of ranks, layout and recipe of each case, and the total counts."""
    table = new_table(console)
    table.add_column("case", overflow="fold")
    table.add_column("ranks", justify="right", no_wrap=True)
    table.add_column("layout", overflow="fold")
    table.add_column("recipe", overflow="fold")
    for line in lines:
        cells = (line.name, str(line.ranks), line.layout, line.recipe)
        table.add_row(*(Text(clean(cell)) for cell in cells))
    print_table(table, console)
    console.print()
    most = max((line.ranks for line in lines), default=0)
    counts = [
        format_count(len(lines), "case"),
        format_count(len({line.recipe for line in lines}), "recipe"),
        f"at most {format_count(most, 'rank')}",
    ]
    print_lines(console, Text(", ".join(counts)))


def describe_recipe(recipe: Recipe) -> str:
    """Return a one-line description of a recipe.

    Example: `gpt: 4 layers, hidden 1024, dense, adamw, float64, 2 steps of 8x16 tokens`.
    """
    steps = f"{recipe.steps} step{'s' if recipe.steps > 1 else ''}"
    size = f"{recipe.data.batch}x{recipe.data.seq_len}"
    return f"{_describe_model(recipe)}, {recipe.optimizer.name}, {recipe.precision}, {steps} of {size} tokens"


def _describe_model(recipe: Recipe) -> str:
    model = recipe.model.reference
    if model is None:
        return recipe.model.title
    head = f"{model.preset}: " if model.preset else ""
    layers = f"{model.num_layers} layer{'s' if model.num_layers > 1 else ''}"
    return f"{head}{layers}, hidden {model.hidden}, {_describe_experts(model.moe)}"


def _describe_experts(moe: MoE | None) -> str:
    return "dense" if moe is None else f"{moe.num_experts} experts top-{moe.top_k}"
