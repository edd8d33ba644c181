"""The process that a user starts: it plans jobs, starts ranks, and reports verdicts. Imports no torch."""
