"""What is checked, besides the comparison with the golden itself."""
