"""Watching a run: metrics, timings, trackers, samples on disk, health hints and the HTML report.

Nothing here steers a run, and importing it loads neither torch nor a tracker's library.
"""
