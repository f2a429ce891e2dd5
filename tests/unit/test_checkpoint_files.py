"""Small files of a checkpoint that are damaged, pointers, or not to be read: each is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotset.checkpoint.source import resolve_model
from hotset.core.errors import CheckpointError


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("{", "`{}` is damaged: it is not JSON", "download or copy"),
        ("[]", "`{}` is damaged: it is not a JSON object", "download or copy"),
        (
            "version https://git-lfs.github.com/spec/v1\noid",
            "`{}` is a Git LFS pointer, not the file itself",
            "git lfs pull",
        ),
    ],
)
def test_a_config_that_is_no_json(tmp_path: Path, text: str, message: str, hint: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(CheckpointError) as caught:
        resolve_model(str(tmp_path))
    assert caught.value.message == message.replace("{}", str(file))
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize("method", ["is_file", "is_dir", "read_bytes"])
def test_what_may_not_be_read_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """As a user without rights to the folder or the file meets it; tests may run as root."""
    (tmp_path / "config.json").write_text("{}")

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, method, refuse)
    with pytest.raises(
        CheckpointError, match=f"cannot read `{tmp_path}.*Permission denied"
    ) as info:
        resolve_model(str(tmp_path))
    assert info.value.hint == "check its owner and permissions"
