"""Results of a run as plain data: verdicts, findings, causes and measurements. No torch."""
