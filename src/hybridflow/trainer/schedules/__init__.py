"""Schedules: which groups are generated ahead of training, and in what order they are trained.

`sync.py` generates each batch when it is asked for, `pinned.py` whole steps ahead, `continuous.py` without a
pause; `collector.py` makes rows in processes beside the driver, and `skip.py` reads them back from a dump.

`schedule.py` decides, from numbers alone. `ledger.py` is the file that says what has happened, and
`ledger_state.py` is what follows from it.
"""
