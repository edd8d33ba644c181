"""Cases as users write them: schema, loading with line numbers, overrides. No torch."""
