"""Schedules: which groups are generated ahead of training, and in what order they are trained.

`schedule.py` decides, from numbers alone. `ledger.py` is the file that says what has happened, and
`ledger_state.py` is what follows from it.
"""
