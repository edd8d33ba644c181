"""The store of what one device computed, read slice by slice."""
