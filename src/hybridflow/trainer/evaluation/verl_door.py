"""The command lines of verl's offline generation and evaluation, in the keys of a run.

["data.path=a.parquet", "rollout.top_k=5"] ──translate──► data.val_files=…, …val_kwargs.top_k=5, and own keys
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from hybridflow.config.recipes import asks_for_help
from hybridflow.observability.logging_setup import setup_logging
from hybridflow.trainer.command import ends_in_status

ROLE = "actor_rollout_ref."


def translate(
    words: Sequence[str], renamed: Mapping[str, str], own: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Return the overrides under their names in a run, and the values of the keys in `own` by name.

    `renamed` has the new names of keys, and of the beginnings of keys that end in a dot; the prefix
    `actor_rollout_ref.`, which newer versions of verl write, is left out for it. Other words stay.
    """
    overrides = []
    given = {}
    for word in words:
        key, sign, value = word.partition("=")
        key = key.lstrip("+")
        if sign and not word.startswith("-"):
            short = key.removeprefix(ROLE)
            block = short.partition(".")[0] + "."
            if key in own:
                given[key] = value.strip("'\"")
                continue
            word = f"{renamed.get(short) or (renamed[block] + short if block in renamed else key)}={value}"
        overrides.append(word)
    return overrides, given


def door(help_text: str, body: Callable[[list[str]], int]) -> Callable[[Sequence[str] | None], int]:
    """Return a `main` that calls `body` with the words of the command line."""

    @ends_in_status
    def main(arguments: Sequence[str] | None = None) -> int:
        """Exit status: that of `body`, or what `ends_in_status` makes of an error."""
        words = list(sys.argv[1:] if arguments is None else arguments)
        if asks_for_help(words):
            sys.stdout.write(help_text)
            return 0
        setup_logging()
        return body(words)

    return main
