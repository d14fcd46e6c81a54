"""The roles of a run: what each is, where it runs, and how its workers are built."""
