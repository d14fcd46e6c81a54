"""Explanations of a run before it starts: its steps, processes, memory and formulas."""
