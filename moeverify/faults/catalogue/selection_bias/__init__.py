"""The bias of loss-free balancing, a state that no gradient moves.

Class D. It changes by the counts of a step, outside of the optimizer, and is neither parameter nor optimizer
state: it is moved too often or never, cast, or left out of a checkpoint.
"""

LETTER = "D"
