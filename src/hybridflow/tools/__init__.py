"""Tools that a model calls: how its calls are written and read."""
