"""What came of a run, as plain data: verdicts, findings, causes, measurements. Imports no torch."""
