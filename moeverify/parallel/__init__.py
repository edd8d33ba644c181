"""One file a parallelism; plan.py alone fixes the order in which they are applied."""
