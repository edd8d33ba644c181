"""Balance loss and z loss: wrong value, wrong weight, or a gradient that never arrives.

Class C. These terms are small compared with the cross entropy, and often only their logged value is
checked.
"""

LETTER = "C"
