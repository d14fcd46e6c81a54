"""A run that starts again waits for devices; one that starts for the first time does not."""

from __future__ import annotations

import logging

import pytest

from hybridflow.controller.build import _wait_for_devices
from hybridflow.errors import ConfigError


class Devices:
    """There from the asking number `come` on."""

    def __init__(self, come: int) -> None:
        self.asked, self.come = 0, come

    def check(self) -> None:
        self.asked += 1
        if self.asked < self.come:
            raise ConfigError("2 wanted, 1 there")


def test_devices_that_come_back_are_waited_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("hybridflow.controller.build.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(
        "hybridflow.controller.build.time.sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds)
    )
    devices = Devices(come=91)
    with caplog.at_level(logging.WARNING, "hybridflow"):
        _wait_for_devices(devices.check, 300.0)
    assert devices.asked == 91
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"waiting up to {left} s for devices: 2 wanted, 1 there" for left in (300, 240)]


def test_without_patience_what_is_missing_is_said_at_once() -> None:
    devices = Devices(come=2)
    with pytest.raises(ConfigError, match="1 there"):
        _wait_for_devices(devices.check, 0.0)
    assert devices.asked == 1
