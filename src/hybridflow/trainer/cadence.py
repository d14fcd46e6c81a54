"""When a run validates and saves, by its `trainer.*` keys."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cadence:
    """The steps of a run after which it validates and saves; steps count from 1."""

    total_steps: int
    test_freq: int
    """Validate every so many steps; 0 or less: not between."""
    save_freq: int
    """Save every so many steps; 0 or less: not between."""
    validates_last: bool
    """Validate after the last step."""
    saves_last: bool
    """Save after the last step, and whenever a signal ends the run: its steps are to outlive it."""
    validates_first: bool = False
    """Validate before the first step."""
    only_validates: bool = False
    """Validate once, and train nothing."""

    def validates_before(self, done: int) -> bool:
        """Return whether a run that has `done` steps validates before it takes the next one."""
        return self.only_validates or (self.validates_first and done == 0)

    def validates_after(self, step: int) -> bool:
        """Return whether a validation follows this step."""
        return self._due(step, self.test_freq, self.validates_last)

    def saves_after(self, step: int) -> bool:
        """Return whether a checkpoint follows this step."""
        return self._due(step, self.save_freq, self.saves_last)

    def _due(self, step: int, frequency: int, at_the_end: bool) -> bool:
        if step == self.total_steps:
            return at_the_end
        return frequency > 0 and step % frequency == 0
