"""DDP and FSDP: gradients that are reduced over too few ranks, or with the wrong divisor.

Class I. A wrapper's reduction follows from its arguments: groups, hybrid meshes and ignored modules.
"""

LETTER = "I"
