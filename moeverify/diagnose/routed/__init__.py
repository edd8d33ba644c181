"""What the routed experts of one device make of tokens, and which of that ranks have got back."""
