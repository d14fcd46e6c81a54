"""The libraries that trackers need, and their environment variables: checked before a model is loaded.

Nothing of them is imported here, so looking takes no time.
"""

from __future__ import annotations

import netrc
import os
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from packaging.version import Version

from hybridflow.config.trainer import TRACKER_LIBRARIES
from hybridflow.errors import ConfigError, install_extra


def check_library(name: str) -> None:
    """Raise ConfigError where the library of a tracker is missing, too old, or lacks a key that it needs."""
    if not is_installed(name):
        raise ConfigError(
            f"trainer.logger lists {name!r}, and {name} is not installed: "
            f"{install_extra(name)}, or take {name!r} out of trainer.logger"
        )
    try:
        found = version(name)
    except PackageNotFoundError:  # a module that is put in its place has no version
        found = TRACKER_LIBRARIES[name]
    if Version(found) < Version(TRACKER_LIBRARIES[name]):
        raise ConfigError(
            f"trainer.logger lists {name!r}, and {name} {found} is installed, which is older than "
            f"{TRACKER_LIBRARIES[name]}: {install_extra(name)}, or take {name!r} out of trainer.logger"
        )
    if missing := _missing_key(name):
        raise ConfigError(f"trainer.logger lists {name!r}, {missing}; or take {name!r} out of trainer.logger")


def is_installed(module: str) -> bool:
    """Return whether a module can be found."""
    try:
        return find_spec(module) is not None
    except ValueError:  # set to None in sys.modules
        return False


def wandb_key_is_set() -> bool:
    """Return whether the environment, or the file that `wandb login` writes, has a key."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    files = [Path(os.environ.get("NETRC", "~/.netrc")), Path("~/_netrc")]
    return any(_has_password(file.expanduser(), host) for file in files)


def swanlab_key_is_set() -> bool:
    """Return whether the environment, or the file that `swanlab login` writes, has a key."""
    home = os.environ.get("SWANLAB_ROOT") or os.environ.get("SWANLAB_SAVE_DIR") or "~/.swanlab"
    folders = [Path(".swanlab"), Path(home).expanduser()]
    return bool(os.environ.get("SWANLAB_API_KEY")) or any((folder / ".netrc").is_file() for folder in folders)


def clearml_key_is_set() -> bool:
    """Return whether the environment has credentials, or `clearml-init` has written its file."""
    file = Path(os.path.expandvars(os.environ.get("CLEARML_CONFIG_FILE", "~/clearml.conf"))).expanduser()
    return file.is_file() or any(
        os.environ.get(name) for name in ("CLEARML_API_ACCESS_KEY", "CLEARML_AUTH_TOKEN")
    )


def _has_password(file: Path, host: str) -> bool:
    if not file.is_file():
        return False
    try:
        return netrc.netrc(file).authenticators(host) is not None
    except (netrc.NetrcParseError, OSError):
        return False


KEYS: Mapping[str, tuple[Callable[[], bool], tuple[str, ...]]] = {
    "wandb": (wandb_key_is_set, ("online", "shared")),
    "swanlab": (swanlab_key_is_set, ("online", "cloud")),
}
"""For each library that chooses by a key: whether there is one, and the modes that need it."""


def mode_of(name: str) -> str:
    """Return the mode of a library in KEYS: what its variable says, or offline where there is no key."""
    return os.environ.get(f"{name.upper()}_MODE") or ("online" if KEYS[name][0]() else "offline")


def _missing_key(name: str) -> str:
    """Return which key an online tracker lacks and what to do, or nothing."""
    if name == "weave" and not wandb_key_is_set():
        return (
            "which has no offline mode, and there is no key of Weights & Biases: set WANDB_API_KEY or run "
            "`wandb login`"
        )
    if name in KEYS and mode_of(name) in KEYS[name][1] and not KEYS[name][0]():
        prefix = name.upper()
        return (
            f"{prefix}_MODE is {mode_of(name)}, and there is no key: set {prefix}_API_KEY, run "
            f"`{name} login`, or unset {prefix}_MODE, which keeps the run in the run folder"
        )
    return ""
