"""Files in, valid cases out: every rule of every axis, choice and recipe is tried. Imports no torch."""
