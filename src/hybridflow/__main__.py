"""`python -m hybridflow` is the command `hybridflow`."""

from __future__ import annotations

from hybridflow.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
