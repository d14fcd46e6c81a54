"""Benchmarks and scripts are modules here."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "scripts")]
