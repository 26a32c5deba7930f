"""A model's name to a folder: a local one, or a snapshot of a Hugging Face repository."""

from __future__ import annotations

import os
import re

from ..errors import ConfigError

_TOKENIZER_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_MODEL_FILES = [*_TOKENIZER_FILES, "*.safetensors"]
_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?")


def resolve_folder(name: str, revision: str | None = None, tokenizer_only: bool = False) -> str:
    """A local folder is taken as it is; otherwise `name` is a hub id, fetched into huggingface_hub's cache.

    Raises: ConfigError when it is neither, or cannot be fetched.
    """
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        return os.path.abspath(path)
    what, holds = ("tokenizer", "its files") if tokenizer_only else ("model", "config.json and the weights")
    if os.path.exists(path):
        raise ConfigError(f"{what} {name!r} is a file; give the folder that holds {holds}")
    if not _REPOSITORY.fullmatch(name) or name.startswith("."):
        raise ConfigError(f"{what} folder {name!r} does not exist")
    return _snapshot(f"{what} {name!r}", name, revision, _TOKENIZER_FILES if tokenizer_only else _MODEL_FILES)


def _snapshot(what: str, name: str, revision: str | None, patterns: list[str]) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = what + (f" (revision {revision!r})" if revision else "")
    try:
        return snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"])
    except GatedRepoError:
        why = "its authors grant access on request; ask for it on its page, then log in with `hf auth login`"
    except RepositoryNotFoundError:
        why = "there is no such folder, and no such public repository on the hub"
    except RevisionNotFoundError:
        why = "the repository has no such revision"
    except HFValidationError as error:
        why = f"there is no such folder, and it is no repository id: {error}"
    except LocalEntryNotFoundError:
        why = "there is no such folder, it is not in the local cache, and the hub cannot be reached"
    except Exception as error:  # requests', httpx's and the file system's errors alike
        why = f"cannot be fetched: {type(error).__name__}: {error}"
    raise ConfigError(f"{where}: {' '.join(why.split())}")
