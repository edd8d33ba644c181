"""Experts where a placement puts them: replicas, their sums, and their exchange during training.

Class P. Any rank may hold an expert, several ranks may hold replicas, and experts may move between two
steps. Each replica has a part of the gradient. Everything that depends on the holders of an expert must
follow the placement.
"""

LETTER = "P"
