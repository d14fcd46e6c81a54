"""The key-value caches of generation: rows in slots, and rows in blocks."""
