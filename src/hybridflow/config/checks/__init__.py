"""The checks of a configuration, one file for each part of the schema; `root.check` runs all of them."""
