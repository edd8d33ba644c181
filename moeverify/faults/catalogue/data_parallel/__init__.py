"""DDP and FSDP: gradients that are reduced over too few ranks, or with the wrong divisor.

Class I. What a wrapper is given, its groups, hybrids and ignored modules, decides silently what it reduces.
"""

LETTER = "I"
