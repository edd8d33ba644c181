"""Training state on disk, saved and loaded under any layout, and weights in the formats of others."""
