"""What a run would do, said before it runs: its steps, processes and memory, and its formulas."""
