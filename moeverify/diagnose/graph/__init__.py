"""What ranks and one device compute in a step, operator by operator, and where the two graphs differ."""
