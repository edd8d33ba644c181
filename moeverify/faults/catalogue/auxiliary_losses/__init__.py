"""Balance loss and z loss: wrong value, wrong weight, or a gradient that never arrives.

Class C. The term is small beside the cross entropy, and often only the number that is logged is looked at.
"""

LETTER = "C"
