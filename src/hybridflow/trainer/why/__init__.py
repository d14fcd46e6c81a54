"""Why a run is slow: the waits of its steps, the key that shortens each, and the seconds that would save."""
