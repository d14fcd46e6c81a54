"""Remote files and folders: an address in, a local path out, copied once; and a folder of this machine to
a repository of the Hugging Face hub, or of another hub (HF_ENDPOINT).

"s3://bucket/train.parquet" ──local_file──► ~/.cache/hybridflow/files/<key>/train.parquet
"modelscope://owner/name/train.parquet" ──► the file that the ModelScope client downloaded
"Qwen/Qwen2.5-0.5B" ──hub_folder──► itself, or with HYBRIDFLOW_USE_MODELSCOPE=1 the folder from ModelScope

verl's VERL_USE_MODELSCOPE works as HYBRIDFLOW_USE_MODELSCOPE does.

HubUpload.check ──before hours of work──► HubUpload.send(folder) ──► the address of the commit
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from filelock import FileLock, Timeout
from fsspec.utils import get_protocol
from huggingface_hub import constants, get_session
from huggingface_hub.file_download import repo_folder_name

from hybridflow.errors import ConfigError, DataError, ModelError, install_extra

logger = logging.getLogger(__name__)
LOCK_SECONDS = 3600.0
"""How long one process waits for another that copies the same file."""

MODELSCOPE = ("HYBRIDFLOW_USE_MODELSCOPE", "VERL_USE_MODELSCOPE")
"""Environment variables that take models from ModelScope; the second is verl's."""

HUB_WAITS = (1.0, 2.0, None)
"""Seconds after each attempt to reach the hub; None ends them."""
HUB_SECONDS = 10.0
"""How long one attempt may take."""

_TRUE = ("1", "true", "yes")
_VERSION_KEYS = (
    *("ETag", "etag", "mtime", "LastModified", "last_modified", "modified", "created", "updated"),
    *("md5Hash", "checksum"),
)
TOKEN = "HF_TOKEN"
"""The environment variable that holds the token, if no other is named."""
_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def default_cache_dir() -> Path:
    """`$HYBRIDFLOW_CACHE`, or else `~/.cache/hybridflow`."""
    return Path(os.environ.get("HYBRIDFLOW_CACHE", "~/.cache/hybridflow")).expanduser()


def is_remote(address: str) -> bool:
    """Whether `address` names another file system than this machine's."""
    return "://" in address and get_protocol(address) not in ("file", "local")


def local_file(address: str, cache_dir: str | Path | None = None) -> Path:
    """Return a local path with the content of `address`; each version of a remote file is copied once.

    Raises DataError if there is no such file or the copy came out short, ConfigError if the file system needs
    a package.
    """
    if address.startswith("modelscope://"):
        return _modelscope_file(address, cache_dir)
    if not is_remote(address):
        path = Path(address.removeprefix("file://").removeprefix("local://")).expanduser()
        if path.is_dir():
            raise DataError(f"{address} is a folder; name the parquet, json or jsonl file(s) in it")
        if not path.is_file():
            text = f"no file {address}"
            if not path.is_absolute():
                text += f" (looked in {Path.cwd()})"
            raise DataError(text)
        return path
    try:
        filesystem, path_there = fsspec.core.url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"cannot open {address}: {error}; {install_extra('remote')} or the package named here"
        ) from error
    try:
        info: dict[str, Any] = filesystem.info(path_there)
    except FileNotFoundError as error:
        raise DataError(f"no file {address}") from error
    except Exception as error:  # each file system raises its own kinds: credentials, network, permissions
        raise DataError(f"cannot reach {address}: {type(error).__name__}: {error}") from error
    if info.get("type") == "directory":
        raise DataError(f"{address} is a folder; name the parquet, json or jsonl file(s) in it")
    return _copy_once(
        filesystem, path_there, address, info, Path(cache_dir or default_cache_dir()).expanduser()
    )


def _copy_once(filesystem: Any, path_there: str, address: str, info: dict[str, Any], cache_dir: Path) -> Path:
    size = info.get("size")
    version = next((str(info[key]) for key in _VERSION_KEYS if info.get(key) is not None), "")
    key = hashlib.blake2b(f"{address}\n{size}\n{version}".encode(), digest_size=12).hexdigest()
    target = cache_dir / "files" / key / Path(path_there).name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock", timeout=LOCK_SECONDS):
            if target.is_file() and (size is None or target.stat().st_size == size):
                return target
            logger.info("copying %s (%s bytes) to %s", address, size, target)
            part = target.with_name(target.name + ".part")
            try:
                filesystem.get_file(path_there, str(part))
            except Exception as error:  # as above: each file system's own kinds
                raise DataError(f"copying {address} failed: {type(error).__name__}: {error}") from error
            copied = part.stat().st_size
            if size is not None and copied != size:
                part.unlink()
                raise DataError(f"copied {copied} bytes of {address}, wanted {size}; try again")
            os.replace(part, target)
    except Timeout as error:
        raise DataError(
            f"waited {LOCK_SECONDS:.0f} s for a process that copies {address}; if there is none, remove "
            f"{target}.lock"
        ) from error
    except OSError as error:
        raise DataError(
            f"cannot keep a copy of {address} in {target.parent} ({error}): set data.cache_dir"
        ) from error
    return target


def hub_folder(name: str) -> str:
    """Return `name` itself, or with HYBRIDFLOW_USE_MODELSCOPE=1 the local folder of that ModelScope model.

    verl's VERL_USE_MODELSCOPE does the same; each is set by 1, true or yes. Raises ConfigError if the
    ModelScope client is not installed then, ModelError if ModelScope has no such model.
    """
    variable = _modelscope_variable()
    if variable is None or Path(name).expanduser().exists():
        return name
    if name.startswith(("/", "./", "../", "~")) or name.count("/") != 1:
        return name
    try:
        from modelscope import snapshot_download
    except ImportError as error:
        raise ConfigError(
            f"{variable} is set and {name} is no folder here, so it would be taken from ModelScope, whose "
            f"client is not installed: {install_extra('remote')} or unset {variable}"
        ) from error
    try:
        return str(snapshot_download(name))
    except Exception as error:  # the client raises many kinds for one fact: no such model, or no way to it
        raise ModelError(f"ModelScope could not give {name}: {type(error).__name__}: {error}") from error


def require_hub(name: str) -> None:
    """Raise ModelError where `name` is neither in the hub's cache nor can the hub be reached.

    The hub's own client repeats each of its requests for 23 s, and asks for several files. It does not ask
    with HF_HUB_OFFLINE=1, so neither is it done here.
    """
    cached = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model")
    if constants.HF_HUB_OFFLINE or cached.exists():
        return
    logger.info("there is no folder %s here: it is taken for a name on the model hub", name)
    for wait in HUB_WAITS:
        try:
            get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
            return
        except Exception as error:  # each version of the hub's client has its own kinds
            reason = f"{type(error).__name__}: {error}"
        if wait is not None:
            logger.warning("%s cannot be reached (%s): again in %g s", constants.ENDPOINT, reason, wait)
            time.sleep(wait)
    raise ModelError(
        f"there is no folder {name} (looked in {Path.cwd()}), and {constants.ENDPOINT} cannot be reached to "
        f"look for a model of that name ({reason}): give the path of a model folder, or go online"
    )


def _modelscope_variable() -> str | None:
    """The environment variable, ours or verl's, that asks for ModelScope in place of the hub, or None."""
    return next((name for name in MODELSCOPE if os.environ.get(name, "").lower() in _TRUE), None)


def _modelscope_file(address: str, cache_dir: str | Path | None) -> Path:
    parts = address.removeprefix("modelscope://").split("/")
    if len(parts) < 3 or not all(parts):
        raise DataError(f"got {address}, wanted modelscope://OWNER/DATASET/PATH/TO/FILE")
    try:
        from modelscope.hub.file_download import dataset_file_download
    except ImportError as error:
        raise ConfigError(f"{address} needs the ModelScope client: {install_extra('remote')}") from error
    try:
        options = {}
        if cache_dir:
            options["cache_dir"] = str(cache_dir)
        file = dataset_file_download("/".join(parts[:2]), "/".join(parts[2:]), **options)
    except Exception as error:  # as above
        raise DataError(f"ModelScope could not give {address}: {type(error).__name__}: {error}") from error
    return Path(file)


@dataclass(frozen=True)
class HubUpload:
    """Where a folder goes, and by whose right."""

    repo: str
    """OWNER/NAME of a model repository; made where it does not exist."""
    private: bool = False
    token_env: str = TOKEN
    """Name of the environment variable with the token; a login of `hf auth login` counts for HF_TOKEN."""

    def check(self) -> None:
        """Raise ConfigError if there is no token, it may only read, or a public repository exists.

        The last is refused with `private` only. A token that the hub does not know is refused too. Nothing is
        written.
        """
        from huggingface_hub.errors import RepositoryNotFoundError

        if not _NAME.fullmatch(self.repo):
            raise ConfigError(f"{self.repo!r} names no repository: wanted OWNER/NAME")
        api = self._api()
        try:
            account = api.whoami()
        except Exception as error:  # the client raises many kinds: no way to the hub, no such user
            raise ConfigError(
                f"the hub at {api.endpoint} does not take the token of {self.token_env}: {_short(error)}. "
                "Set one that may write"
            ) from error
        user = account["name"]
        if account.get("auth", {}).get("accessToken", {}).get("role") == "read":
            raise ConfigError(
                f"the token of {self.token_env} may only read what {user} has at {api.endpoint}: set one "
                "that may write"
            )
        try:
            there = api.repo_info(self.repo)
        except RepositoryNotFoundError:
            logger.info("%s will be made at %s by %s", self.repo, api.endpoint, user)
            return
        except Exception as error:  # as above
            raise ConfigError(
                f"the hub at {api.endpoint} does not show {self.repo}: {_short(error)}"
            ) from error
        if self.private and not there.private:
            raise ConfigError(
                f"{self.repo} exists and is public: an upload with --private would publish the model. Name a "
                "new repository, or make this one private first"
            )

    def send(self, folder: Path) -> str:
        """Upload a folder as one commit and return its address; ConfigError leaves the folder as it is."""
        api = self._api()
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        logger.info("uploading %s (%.1f MB) to %s at %s", folder, size / 1e6, self.repo, api.endpoint)
        try:
            api.create_repo(self.repo, private=self.private or None, exist_ok=True)
            commit = api.upload_folder(
                repo_id=self.repo, folder_path=folder, commit_message=f"Upload {folder.name}"
            )
        except Exception as error:  # as above
            again = f"hf upload {self.repo} {shlex.quote(str(folder))}"
            if self.private:
                again += " --private"
            raise ConfigError(
                f"the upload to {self.repo} failed: {_short(error)}. The folder {folder} is whole; try again "
                f"with `{again}`"
            ) from error
        address = str(commit.commit_url)
        logger.info("uploaded to %s", address)
        return address

    def _api(self) -> Any:
        from huggingface_hub import HfApi, get_token

        token = os.environ.get(self.token_env)
        if not token and self.token_env == TOKEN:
            token = get_token()
        if not token:
            raise ConfigError(
                f"an upload to {self.repo} needs a token: set {self.token_env}, or name another environment "
                "variable with --token-env (of `hybridflow merge`), or log in with `hf auth login`"
            )
        return HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token)


def _short(error: Exception) -> str:
    """Return the kind and the first line of an error."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"
