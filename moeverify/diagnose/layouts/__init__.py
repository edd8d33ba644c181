"""The right values in another layout: which mistake of reshapes, transposes and chunks puts each where it stands."""
