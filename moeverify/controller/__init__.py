"""What the process does that a user started: it plans jobs, starts ranks, and judges. Imports no torch."""
