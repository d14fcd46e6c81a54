"""Command-line options that name a file of keys: our own, and Hydra's, which verl's scripts use.

--recipe NAME                                    ──► options.recipe
--config-path FOLDER --config-name NAME          ──► options.flags, which go before the overrides as words
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

HYDRAS = (
    ("--config-path", "-cp", "FOLDER", "folder of a YAML file of your own, as with Hydra"),
    ("--config-dir", "-cd", "FOLDER", "the same"),
    ("--config-name", "-cn", "NAME", "name of that file, or of a recipe"),
)


def add_recipe(words: ArgumentParser, text: str) -> None:
    """Add the options to a command that takes overrides; `text` is the help of --recipe."""
    words.add_argument("--recipe", help=text)
    for flag, short, metavar, meaning in HYDRAS:
        words.add_argument(
            flag,
            short,
            dest="flags",
            action="append",
            type=f"{flag}={{}}".format,
            metavar=metavar,
            help=meaning,
        )


def put_flags_first(options: Namespace) -> None:
    """Put the values of Hydra's options before the overrides, where `config/recipes.py` reads it."""
    if getattr(options, "flags", None):
        options.overrides = [*options.flags, *options.overrides]
