"""The fitted numbers that plans use. A test fits them again and compares."""

from __future__ import annotations

from hybridflow.planner.costs import Efficiency

FITTED = Efficiency(mfu=0.458, sparse_mfu=0.0528, decode_bandwidth=0.92, decode_layer=1.15e-4, update=3.26)
"""Fitted to rows 10, 11 (on-policy), 22 and 26 of `published.yaml`."""
