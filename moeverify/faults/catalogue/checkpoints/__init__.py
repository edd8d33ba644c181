"""Checkpoints: state that is not saved, not loaded, or loaded into another place.

Class O. A fault of this class has two cases, one that saves and one that loads, often under another layout.
"""

LETTER = "O"
