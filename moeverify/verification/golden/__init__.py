"""Storage of goldens, which ranks read slice by slice."""
