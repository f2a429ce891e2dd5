"""From the name of a model to a local folder that can be loaded.

Knows the three kinds of names (`pocket`, a folder, a Hub id) and which files make up a
checkpoint. Knows nothing of what is inside the files; remote code is never fetched or trusted.
"""

from __future__ import annotations

import importlib.resources
import os
import re
from pathlib import Path

from hotset.checkpoint import hub
from hotset.checkpoint.files import readable
from hotset.checkpoint.quantised import declared_quantisation
from hotset.core.errors import CheckpointError, ConfigError

POCKET = "pocket"

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def resolve_model(name: str, revision: str | None = None) -> Path:
    """The folder with config, tokenizer and safetensors files of a model, downloaded if need be.

    Args:
        name: `pocket` (the model inside the package; `./pocket` is a folder of that name), a
            folder, or a Hub id.
        revision: branch, tag or commit of a Hub id.

    Raises:
        CheckpointError: no such model, no safetensors files in it, or one that is quantised by a
            method that hotset does not read; the latter before weights are downloaded.
        CapacityError: the disk cannot take the download.
    """
    folder = resolve_config_only(name, revision)
    if local_folder(name) is None:
        folder = hub.download(name, revision)
    hub.require_safetensors(str(folder), os.listdir(folder))
    return folder


def resolve_config_only(name: str, revision: str | None = None) -> Path:
    """As `resolve_model`, but of a Hub id only configs and the shard list are fetched.

    Raises:
        CheckpointError: no such model, it has no `config.json`, or it is quantised by a method
            that hotset does not read.
        ConfigError: a revision of what is no Hub id.
    """
    folder = local_folder(name)
    if folder is not None and revision is not None:
        raise ConfigError(
            f"`--revision {revision}` is of a model on the Hub, `{name}` is a folder on this disk",
            hint="leave the revision out, or give a Hub id",
        )
    folder = folder or hub.download_configs(name, revision)
    declared_quantisation(folder)  # raises on a method that hotset does not read
    return folder


def local_folder(name: str) -> Path | None:
    """The local folder that `name` means, or `None` when it is a Hub id.

    Raises:
        CheckpointError: it can be neither, cannot be read, or has no `config.json`.
    """
    with readable(Path(name)):
        return _local_folder(name)


def _local_folder(name: str) -> Path | None:
    if name == POCKET:
        return Path(str(importlib.resources.files("hotset") / "models" / POCKET))
    path = Path(name).expanduser()
    if name and path.is_dir():
        _require_config(path)
        return path
    if path.suffix == ".gguf":
        raise CheckpointError(f"`{name}` is a GGUF file", hint=hub.GGUF_HINT)
    if path.is_file():
        raise CheckpointError(
            f"`{name}` is a file, not a checkpoint folder",
            hint="give the folder that holds `config.json` and the safetensors files",
        )
    if path.is_absolute() or not _HUB_ID.fullmatch(name) or name.startswith("."):
        raise CheckpointError(
            f"no folder `{name}`",
            hint="give an existing folder, a Hub id `owner/name`, or `pocket`",
        )
    return None


def _require_config(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        gguf = next(folder.glob("*.gguf"), None)
        if gguf is not None:
            raise CheckpointError(f"`{folder}` holds GGUF files", hint=hub.GGUF_HINT)
        raise CheckpointError(
            f"no `config.json` in `{folder}`", hint="give the folder of a Hugging Face checkpoint"
        )
