"""The megablocks package as the experts of the reference model. Only `block.py` imports it directly."""
