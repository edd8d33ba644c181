"""The bias of loss-free balancing, a state that no gradient moves.

Class D. The bias changes by the counts of a step, outside of the optimizer. It is neither a parameter nor
optimizer state. It may be moved too often or never, cast to another dtype, or left out of a checkpoint.
"""

LETTER = "D"
