"""Export of figures to tracking services, one module each; all of them are optional."""
