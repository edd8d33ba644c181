"""Parts of the parameters in words: `all parameters of experts in layers 2-3`."""

from __future__ import annotations

from moeverify.report.numbers import format_range, format_ranks
from moeverify.results.parameter_part import ParameterPart, Trait


def describe_part(part: ParameterPart) -> str:
    """Return the parameters to which a finding applies; rounding may hide it in others."""
    ways = [" ".join(map(_describe, traits)) for traits in (part.traits, *part.alternatives)]
    which = f"parameters {', or '.join(ways)}"
    if part.unseen:
        return (
            f"it is so of {part.count} of the {part.count + part.unseen} {which}, could not be seen in the other "
            f"{part.unseen}, and is seen in no others of {part.total}"
        )
    return f"it is so of all {part.count} {which}, and seen in no others of {part.total}"


def _describe(trait: Trait) -> str:
    plural = "s" if len(trait.numbers) > 1 else ""
    number = trait.numbers[0] if trait.numbers else 0
    return {
        "named": f"with {trait.name} in their names",
        "not-named": f"without a part `{trait.name}` in their names",
        "dims": f"of {number} dim{'s' if number != 1 else ''}",
        "layers": f"in layer{plural} {format_range(trait.numbers)}",
        "from": f"from {trait.name} on in the order of the model",
        "before": f"before {trait.name} in the order of the model",
        "every-other": f"at {'odd' if number else 'even'} places in the order of the model",
        "larger": f"of {number} or more elements",
        "smaller": f"of fewer than {number} elements",
        "sharded": f"sharded over {trait.name}",
        "replicated": f"replicated over {trait.name}",
        "on-ranks": f"that {format_ranks(trait.numbers)} alone hold{'' if plural else 's'}",
    }[trait.kind]
