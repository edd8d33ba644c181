"""What a user writes: the schema of a case, its loading with line numbers, its overrides; no torch."""
