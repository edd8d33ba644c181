"""Which rank holds which experts: placements, traces of their load, and solvers from one to the other. No torch."""
