"""The controller process: plans jobs, starts ranks, and reports verdicts. No torch."""
