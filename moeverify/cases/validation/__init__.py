"""Loading of valid cases from files, with every rule of every axis, choice and recipe. Imports no torch."""
