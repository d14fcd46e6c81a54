"""The worker that becomes a command of the user's, so that its keeper ends all that the command starts."""

from __future__ import annotations

import json
import os


def main(file_descriptor: int) -> None:
    """Become the command whose words an open file has as a list of JSON."""
    with open(file_descriptor, encoding="utf-8") as file:
        words = json.load(file)
    os.execvp(words[0], words)
