"""A folder of this machine to a repository of the Hugging Face hub, or of another hub (HF_ENDPOINT).

HubUpload.check ──before hours of work──► HubUpload.send(folder) ──► the address of the commit
"""

from __future__ import annotations

import logging
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.errors import ConfigError

logger = logging.getLogger(__name__)

TOKEN = "HF_TOKEN"
"""The environment variable that holds the token, if no other is named."""
_NAME = re.compile(r"[\w.-]+/[\w.-]+")


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
