"""How a user's `parallelize` uses each axis, in words."""

from moeverify.results.facts import AxisUse, AxisUses

# A plan that divides a smaller share of the parameters says little about its axis.
_MOST_WHOLE = 0.5


def describe_uses(facts: AxisUses) -> str:
    """Return the number of divided parameters and the collectives of each axis."""
    return "; ".join(map(_describe_use, facts.axes))


def describe_shares(facts: AxisUses) -> str:
    """Return the share of the parameters that an axis divides, if it divides some but less than half."""
    return "; ".join(_describe_share(use) for use in facts.axes if 0.0 < use.share < _MOST_WHOLE)


def _describe_use(use: AxisUse) -> str:
    sent = ", ".join(f"{number} {op}" for op, number in use.collectives.items()) or "no collectives"
    return f"{use.axis} divides {use.num_divided} of {use.num_parameters} parameters, {sent}"


def _describe_share(use: AxisUse) -> str:
    divided = f"{use.axis} divided {100 * use.share:.0f} % of the parameters"
    return f"{divided} ({use.num_divided} of {use.num_parameters} tensors); the others are whole on each rank"
