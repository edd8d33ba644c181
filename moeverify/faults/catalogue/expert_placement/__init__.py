"""Experts where a placement puts them: replicas, their sums, and their exchange during training.

Class P. An expert is on any ranks, several of which may hold a replica, and goes to others between two steps. Each
replica has a part of the gradient, and what depends on who holds an expert must change with the placement.
"""

LETTER = "P"
