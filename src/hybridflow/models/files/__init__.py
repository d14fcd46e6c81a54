"""From a folder to a model and back: reading, building, changing, writing."""
