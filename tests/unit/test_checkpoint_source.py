"""Names of models: what each kind resolves to, and what is said when it does not.

The Hub is a stand-in for its client's functions: no test goes out to the network.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from huggingface_hub import constants, errors

from hotset.checkpoint import hub
from hotset.checkpoint.hub import wanted_files
from hotset.checkpoint.quantised import declared_quantisation
from hotset.checkpoint.source import resolve_config_only, resolve_model
from hotset.core.errors import CapacityError, CheckpointError, ConfigError, HotsetError

RESPONSE = SimpleNamespace(headers={}, request=None)


class DiskUsage(NamedTuple):
    total: int
    used: int
    free: int


class FakeHub:
    """Stands in for the functions of `huggingface_hub` that are used.

    Args:
        files: name -> bytes of the one repository there is.
        failure: raised instead of answering.
        cached: whether a snapshot lies in the cache.
    """

    def __init__(
        self, folder: Path, files: dict[str, int], failure: Exception | None, cached: bool
    ) -> None:
        self.folder, self.files, self.failure, self.cached = folder, files, failure, cached
        self.downloaded: list[str] = []
        self.config = "{}"

    def HfApi(self) -> FakeHub:  # noqa: N802
        return self

    def model_info(self, repo_id: str, **_: object) -> Any:
        if self.failure:
            raise self.failure
        siblings = [SimpleNamespace(rfilename=n, size=s) for n, s in self.files.items()]
        return SimpleNamespace(siblings=siblings, sha="c0ffee")

    def try_to_load_from_cache(self, repo_id: str, name: str, **_: object) -> str | None:
        return name if self.cached else None

    def snapshot_download(
        self,
        repo_id: str,
        *,
        revision: str | None,
        allow_patterns: list[str] | None = None,
        local_files_only: bool = False,
    ) -> str:
        if local_files_only:
            if not self.cached:
                raise errors.LocalEntryNotFoundError("nothing cached")
            return str(self.folder)
        if self.failure:
            raise self.failure
        assert allow_patterns is not None
        self.downloaded = [name for name in self.files if name in allow_patterns]
        for name in self.downloaded:
            (self.folder / name).write_text(self.config)
        return str(self.folder)


FILES = {
    "config.json": 100,
    "tokenizer.json": 200,
    "chat_template.jinja": 10,
    "model-00001-of-00002.safetensors": 3 * 2**30,
    "model-00002-of-00002.safetensors": 2 * 2**30,
    "consolidated.safetensors": 5 * 2**30,
    "pytorch_model.bin": 5 * 2**30,
    "original/model.safetensors": 5 * 2**30,
    "modeling_custom.py": 10,
    "README.md": 10,
}


@pytest.fixture
def fake_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def install(
        files: dict[str, int] = FILES,
        *,
        failure: Exception | None = None,
        cached: bool = False,
        offline: bool = False,
        free_bytes: int = 2**40,
    ) -> FakeHub:
        fake = FakeHub(tmp_path, files, failure, cached)
        monkeypatch.setattr(hub, "huggingface_hub", fake)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", "/cache/hub")
        monkeypatch.setattr(hub.shutil, "disk_usage", lambda _: DiskUsage(0, 0, free_bytes))
        return fake

    return install


def test_pocket_is_inside_the_package() -> None:
    folder = resolve_model("pocket")
    assert (folder / "config.json").is_file()
    assert list(folder.glob("*.safetensors"))
    assert resolve_config_only("pocket") == folder


def test_a_folder_is_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_config_only(str(tmp_path)) == tmp_path
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve_model(str(tmp_path)) == tmp_path


LOCAL_FAULTS = [
    (["config.json"], "{}", "`{}` has no safetensors files"),
    (
        ["config.json", "pytorch_model.bin"],
        "{}",
        "`{}` holds pickled weights (`pytorch_model.bin`), which can run code when read",
    ),
    (["config.json", "model-q4.gguf"], "{}", "`{}` holds GGUF files"),
    (["model-q4.gguf"], "{}", "`{}` holds GGUF files"),
    (["model-q4.gguf"], "{}/model-q4.gguf", "`{}/model-q4.gguf` is a GGUF file"),
    (["model.safetensors"], "{}", "no `config.json` in `{}`"),
    (
        ["model.safetensors"],
        "{}/model.safetensors",
        "`{}/model.safetensors` is a file, not a checkpoint folder",
    ),
    ([], "{}/absent", "no folder `{}/absent`"),
    ([], "./absent", "no folder `./absent`"),
    ([], "../absent", "no folder `../absent`"),
    ([], "~/absent-model", "no folder `~/absent-model`"),
    ([], "a/b/c", "no folder `a/b/c`"),
    ([], "", "no folder ``"),
]


@pytest.mark.parametrize(("files", "name", "message"), LOCAL_FAULTS)
def test_what_is_no_checkpoint_is_refused(
    tmp_path: Path, files: list[str], name: str, message: str
) -> None:
    for file in files:
        (tmp_path / file).write_text("{}")
    with pytest.raises(CheckpointError) as caught:
        resolve_model(name.replace("{}", str(tmp_path)))
    assert caught.value.message == message.replace("{}", str(tmp_path))


def test_of_a_repository_only_what_loading_needs_is_fetched(fake_hub: Any, tmp_path: Path) -> None:
    fake = fake_hub()
    assert resolve_model("owner/name") == tmp_path
    assert fake.downloaded == [
        *("config.json", "tokenizer.json", "chat_template.jinja"),
        *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    ]


def test_a_vendors_own_shards_are_taken_when_there_are_no_others() -> None:
    assert wanted_files(["config.json", "consolidated.safetensors"]) == [
        "config.json",
        "consolidated.safetensors",
    ]


def test_for_a_plan_no_weights_are_fetched(fake_hub: Any, tmp_path: Path) -> None:
    fake = fake_hub()
    assert resolve_config_only("owner/name") == tmp_path
    assert fake.downloaded == ["config.json"]


def test_a_download_that_does_not_fit_is_refused_before_it_starts(
    fake_hub: Any, tmp_path: Path
) -> None:
    fake = fake_hub(free_bytes=2**30)
    with pytest.raises(CapacityError) as caught:
        resolve_model("owner/name")
    assert caught.value.message == (
        "downloading `owner/name` needs 5.00 GiB, 1.00 GiB is free in `/cache/hub`"
    )
    assert "HF_HOME" in str(caught.value)
    assert fake.downloaded == ["config.json"]
    # What is cached need not fit a second time.
    fake_hub(free_bytes=2**30, cached=True)
    assert resolve_model("owner/name") == tmp_path


def test_a_quantised_repository_is_refused_before_its_weights_are_fetched(fake_hub: Any) -> None:
    fake = fake_hub()
    fake.config = '{"quantization_config": {"quant_method": "quark"}}'
    with pytest.raises(CheckpointError, match="are quantised with `quark`"):
        resolve_model("owner/name")
    assert fake.downloaded == ["config.json"]


def test_offline_the_cache_is_used_without_a_question(fake_hub: Any, tmp_path: Path) -> None:
    fake_hub(offline=True, cached=True, failure=AssertionError("the Hub was asked"))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve_model("owner/name") == tmp_path
    assert resolve_config_only("owner/name") == tmp_path


def test_an_unreachable_hub_is_said_when_the_cache_answers(
    fake_hub: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake_hub(cached=True, failure=errors.HTTPError("no route"))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve_model("owner/name") == tmp_path
    assert "the Hub cannot be reached; using the cached copy of `owner/name`" in caplog.text


HUB_FAULTS = [
    (
        {"failure": errors.GatedRepoError("401", response=RESPONSE)},
        "`owner/name` is gated",
        "accept its terms at https://huggingface.co/owner/name",
    ),
    (
        {"failure": errors.RepositoryNotFoundError("404", response=RESPONSE)},
        "no model `owner/name` on the Hub, and no folder of that name here",
        "check the spelling",
    ),
    (
        {"failure": errors.RevisionNotFoundError("404", response=RESPONSE)},
        "`owner/name` has no revision `v9`",
        "give a branch",
    ),
    (
        {"failure": errors.HfHubHTTPError("503 busy\nmore", response=RESPONSE)},
        "the Hub refused `owner/name`: 503 busy",
        "",
    ),
    (
        {"failure": errors.HTTPError("no route")},
        "the Hub cannot be reached for `owner/name`: no route",
        "check the network",
    ),
    (
        {"failure": errors.LocalEntryNotFoundError("Got: Timeout: no answer\nTry again.")},
        "the Hub cannot be reached for `owner/name`: Timeout: no answer",
        "check the network",
    ),
    (
        {"failure": OSError(28, "No space left on device")},
        "cannot store `owner/name` in `/cache/hub`: [Errno 28] No space left on device",
        "free some space",
    ),
    (
        {"offline": True},
        "`owner/name` at revision `v9` is not in the cache `/cache/hub` "
        "and `HF_HUB_OFFLINE` is set",
        "unset `HF_HUB_OFFLINE`",
    ),
    (
        {"files": {"config.json": 1, "pytorch_model.bin": 1}},
        "`owner/name` holds pickled weights (`pytorch_model.bin`), which can run code when read",
        "save_pretrained",
    ),
    (
        {"files": {"config.json": 1, "m.gguf": 1}},
        "`owner/name` holds GGUF files",
        "GGUF is not supported",
    ),
]


@pytest.mark.parametrize(("setup", "message", "hint"), HUB_FAULTS)
def test_what_the_hub_answers_is_explained(
    fake_hub: Any, setup: dict[str, Any], message: str, hint: str
) -> None:
    fake_hub(**setup)
    with pytest.raises(HotsetError) as caught:
        resolve_model("owner/name", "v9")
    assert caught.value.message == message
    assert hint in str(caught.value)


@pytest.mark.parametrize("resolve", [resolve_model, resolve_config_only])
def test_only_the_hub_has_revisions(
    tmp_path: Path, resolve: Callable[[str, str | None], Path]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in ("pocket", str(tmp_path)):
        with pytest.raises(ConfigError, match="`--revision v9` is of a model on the Hub"):
            resolve(name, "v9")


def test_a_repository_without_a_config_is_refused(fake_hub: Any) -> None:
    fake_hub(files={"README.md": 1})
    with pytest.raises(CheckpointError, match=r"has no `config.json`"):
        resolve_config_only("owner/name")


QUANTISED = [
    ({"quantization_config": {"quant_method": "awq", "bits": 4}}, {}, "awq"),
    ({"quantization_config": {"quant_method": "fp8"}}, {}, "fp8"),
    (
        {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}},
        {},
        "compressed-tensors pack-quantized",
    ),
    ({"text_config": {"quantization_config": {"quant_method": "gptq"}}}, {}, "gptq"),
    ({}, {"quantization": {"quant_algo": "NVFP4"}}, "modelopt NVFP4"),
    ({"model_type": "mixtral", "quantization_config": None}, {}, None),
]


def _write_configs(folder: Path, config: dict[str, Any], exported: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    if exported:
        (folder / "hf_quant_config.json").write_text(json.dumps(exported))


@pytest.mark.parametrize(("config", "exported", "name"), QUANTISED)
def test_the_declared_quantisation_is_found(
    tmp_path: Path, config: dict[str, Any], exported: dict[str, Any], name: str | None
) -> None:
    _write_configs(tmp_path, config, exported)
    found = declared_quantisation(tmp_path)
    assert (found.name if found else None) == name


@pytest.mark.parametrize(
    ("config", "name"),
    [({"quant_method": "bitsandbytes"}, "bitsandbytes"), ({"bits": 3}, "an unnamed method")],
)
def test_a_method_that_is_not_read_is_refused(
    tmp_path: Path, config: dict[str, Any], name: str
) -> None:
    _write_configs(tmp_path, {"quantization_config": config}, {})
    with pytest.raises(CheckpointError) as caught:
        resolve_config_only(str(tmp_path))
    assert caught.value.message == (
        f"`{tmp_path / 'config.json'}` says that the weights are quantised with `{name}`, which "
        "hotset does not read"
    )
    assert caught.value.hint is not None and "compressed-tensors" in caught.value.hint


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_config_that_is_not_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="is damaged: it is not"):
        declared_quantisation(tmp_path)


def test_it_is_found_without_importing_torch() -> None:
    code = (
        "import sys, hotset.checkpoint.quantised, hotset.checkpoint.source, "
        "hotset.checkpoint.index; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
