"""Checkpoints on the Hugging Face Hub: what is fetched, whether it fits the disk, what went wrong.

Goes through `huggingface_hub`, with its cache, its token and its offline mode. Knows files by
name and size only. Everything that the Hub or the network can answer becomes an error that says
what to do.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants, errors

from hotset.core.errors import CapacityError, CheckpointError
from hotset.core.units import format_bytes

logger = logging.getLogger(__name__)

GGUF_HINT = "GGUF is not supported; use the safetensors checkpoint that it was converted from"

_CONFIG_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth")

# What `plan` needs: no tokenizer, no weights.
_LIGHT_FILES = ["config.json", "hf_quant_config.json", "model.safetensors.index.json"]

# The base class of every network failure. It comes from httpx, or from httpx2 in newer lines of
# huggingface_hub; taking it from there spares guessing which.
_NetworkError: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]


def wanted_files(names: Iterable[str]) -> list[str]:
    """Of a repository's files, those that loading needs: configs, tokenizer, safetensors.

    Files in sub-folders are other exports of the same weights (`original/`, `onnx/`, ...), and
    `consolidated*.safetensors` beside other shards is the vendor's own copy.
    """
    top = [name for name in names if "/" not in name]
    weights = [name for name in top if name.endswith(".safetensors")]
    own = [name for name in weights if not name.startswith("consolidated")]
    return [name for name in top if name.endswith(_CONFIG_SUFFIXES)] + (own or weights)


def require_safetensors(name: str, files: Iterable[str]) -> None:
    """Refuses a checkpoint without safetensors files.

    Raises:
        CheckpointError: says what there is instead and how to convert it.
    """
    files = list(files)
    if any(file.endswith(".safetensors") for file in files):
        return
    if any(file.endswith(".gguf") for file in files):
        raise CheckpointError(f"`{name}` holds GGUF files", hint=GGUF_HINT)
    pickles = [file for file in files if file.endswith(_PICKLE_SUFFIXES)]
    if pickles:
        raise CheckpointError(
            f"`{name}` holds pickled weights (`{pickles[0]}`), which can run code when read",
            hint="convert it once: load it with transformers and call `save_pretrained(folder)`",
        )
    raise CheckpointError(
        f"`{name}` has no safetensors files", hint="only its configs may have been fetched so far"
    )


def download(repo_id: str, revision: str | None = None) -> Path:
    """Brings a checkpoint into the Hub cache, or finds it there, and returns its folder.

    Raises:
        CheckpointError: not found, gated, not cached while offline, unreachable, no safetensors.
        CapacityError: the cache's disk has less free than is still to be downloaded.
    """
    if constants.HF_HUB_OFFLINE:
        return _cached(repo_id, revision)
    try:
        with _explained(repo_id, revision):
            info = huggingface_hub.HfApi().model_info(
                repo_id, revision=revision, files_metadata=True
            )
    except _UnreachableError as error:
        return _cached_instead(repo_id, revision, error)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    require_safetensors(repo_id, [name for name in sizes if "/" not in name])
    wanted = wanted_files(sizes)
    _require_disk(repo_id, {name: sizes[name] for name in wanted}, info.sha)
    with _explained(repo_id, revision):
        folder = huggingface_hub.snapshot_download(
            repo_id, revision=revision, allow_patterns=wanted
        )
    return Path(folder)


def download_configs(repo_id: str, revision: str | None = None) -> Path:
    """Fetches `config.json` and the shard list only, and returns the folder in the Hub cache.

    Raises:
        CheckpointError: as for `download`, or the repository has no `config.json`.
    """
    if constants.HF_HUB_OFFLINE:
        folder = _cached(repo_id, revision)
    else:
        try:
            with _explained(repo_id, revision):
                folder = Path(
                    huggingface_hub.snapshot_download(
                        repo_id, revision=revision, allow_patterns=_LIGHT_FILES
                    )
                )
        except _UnreachableError as error:
            folder = _cached_instead(repo_id, revision, error)
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"`{repo_id}` has no `config.json`", hint="is it a model repository?")
    return folder


class _UnreachableError(CheckpointError):
    """The Hub gave no answer at all; a cached copy may do."""


def _cached(repo_id: str, revision: str | None) -> Path:
    """The cached snapshot, without asking the Hub."""
    try:
        return Path(
            huggingface_hub.snapshot_download(repo_id, revision=revision, local_files_only=True)
        )
    except errors.LocalEntryNotFoundError as error:
        at = f" at revision `{revision}`" if revision else ""
        raise CheckpointError(
            f"`{repo_id}`{at} is not in the cache `{constants.HF_HUB_CACHE}` "
            "and `HF_HUB_OFFLINE` is set",
            hint="unset `HF_HUB_OFFLINE` once to download it, or set `HF_HOME` to the right cache",
        ) from error


def _cached_instead(repo_id: str, revision: str | None, unreachable: _UnreachableError) -> Path:
    """The cached snapshot where the Hub is unreachable; says so once."""
    try:
        folder = _cached(repo_id, revision)
    except CheckpointError:
        raise unreachable from None
    logger.warning("the Hub cannot be reached; using the cached copy of `%s`", repo_id)
    return folder


def _require_disk(repo_id: str, sizes: dict[str, int], commit: str | None) -> None:
    """Refuses a download that the cache's disk cannot take; cached files do not count."""
    need_bytes = sum(
        size
        for name, size in sizes.items()
        if not isinstance(
            huggingface_hub.try_to_load_from_cache(repo_id, name, revision=commit), str
        )
    )
    cache = Path(constants.HF_HUB_CACHE)
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    free_bytes = shutil.disk_usage(existing).free
    if need_bytes > free_bytes:
        raise CapacityError(
            f"downloading `{repo_id}` needs {format_bytes(need_bytes)}, "
            f"{format_bytes(free_bytes)} is free in `{cache}`",
            hint="free some space, or set `HF_HOME` to a folder on a larger disk",
        )


@contextmanager
def _explained(repo_id: str, revision: str | None) -> Iterator[None]:
    """Turns whatever the Hub client raises into an error that says what to do."""
    try:
        yield
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"`{repo_id}` is gated",
            hint=f"accept its terms at https://huggingface.co/{repo_id}, then run `hf auth login`",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"no model `{repo_id}` on the Hub, and no folder of that name here",
            hint="check the spelling; for a private model run `hf auth login`",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(
            f"`{repo_id}` has no revision `{revision}`", hint="give a branch, a tag or a commit"
        ) from error
    except errors.HFValidationError as error:
        raise CheckpointError(
            f"`{repo_id}` is neither a folder nor a Hub id", hint="a Hub id is `owner/name`"
        ) from error
    except errors.HfHubHTTPError as error:
        raise CheckpointError(f"the Hub refused `{repo_id}`: {_first_line(error)}") from error
    except (_NetworkError, errors.LocalEntryNotFoundError, ConnectionError, TimeoutError) as error:
        raise _UnreachableError(
            f"the Hub cannot be reached for `{repo_id}`: {_first_line(error)}",
            hint="check the network; a cached model is found with `HF_HUB_OFFLINE=1`",
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"cannot store `{repo_id}` in `{constants.HF_HUB_CACHE}`: {_first_line(error)}",
            hint="free some space or fix its permissions, or set `HF_HOME` to another folder",
        ) from error


def _first_line(error: Any) -> str:
    # The Hub client puts the cause before advice of its own: `Got: Cause: words`.
    first = str(error).strip().partition("\n")[0].removeprefix("Got: ")
    return first or type(error).__name__
