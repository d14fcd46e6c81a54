"""From prompts to scored rows: requests, who answers them, rewards, failures, what becomes a row.

    prompts ──planning──► requests ──agents──► trajectories ──scoring──► rewards ──pipeline──► rows

`pipeline.py` is the one maker, for every schedule, for validation and for collectors. `filters.py` finds
the groups that can teach anything, and shapes and filters what was cut; `failures.py` counts what failed in a
run, `rollout_traces.py` sends what happened.
"""
