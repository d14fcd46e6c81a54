"""The solution and its tests in separate processes: only values cross, as data.

    calls ──► solution ──values──► compared in the reward's worker     batch.py, programs.py
    tests ──calls, as they come──► solution ──values──► tests          tests.py, solution.py

`encoding.py` writes values beside the solution, and `decoding.py` reads them where nothing of it runs. These
files go as texts to interpreters that may have the standard library only; `programs.py` joins them.
"""
