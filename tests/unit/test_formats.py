"""Every published layout of quantised weights: what it unpacks to, and what is refused.

Matrices are packed bit by bit in `tests/quantised.py`, which shares nothing with the package.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hotset.checkpoint.index import CheckpointIndex
from hotset.checkpoint.packed import PackedEntry, dequantise_entry, fold
from hotset.checkpoint.quantised import Declared
from hotset.checkpoint.reader import ShardReader
from hotset.core.errors import CheckpointError
from hotset.kernels.dequantise import dequantise_matrix
from quantised import DIALECTS, Dialect, Group, compressed_int4, int8, pairs, words

ROWS, COLUMNS = 40, 56  # whole words of eight, and no multiple of any group or block


@dataclass
class Saved:
    """A file with the tensors of one matrix `a.weight`."""

    folder: Path
    declared: Declared | None

    def fold(self) -> PackedEntry:
        (entry,) = fold(CheckpointIndex.read(self.folder), self.declared).values()
        assert isinstance(entry, PackedEntry)
        return entry

    def weight(self) -> torch.Tensor:
        with ShardReader() as reader:
            return dequantise_entry(reader, self.fold(), torch.float32)


def save(folder: Path, group: Group, config: dict[str, object] | None) -> Saved:
    save_file({f"a.{name}": tensor for name, tensor in group.items()}, folder / "model.safetensors")
    if config is None:
        return Saved(folder, None)
    words_ = [str(config[key]) for key in ("quant_method", "quant_algo", "format") if key in config]
    dtype = config.get("expert_dtype")
    declared = Declared(folder / "config.json", words_[0], " ".join(words_), config, dtype)  # type: ignore[arg-type]
    return Saved(folder, declared)


def make(dialect: Dialect, seed: int = 1) -> tuple[Group, torch.Tensor]:
    return dialect.make(ROWS, COLUMNS, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", DIALECTS)
def test_a_matrix_unpacks_to_what_was_packed(name: str, tmp_path: Path) -> None:
    """Bit for bit: a code times a scale is rounded once on either side."""
    group, matrix = make(DIALECTS[name])
    saved = save(tmp_path, group, DIALECTS[name].config)
    assert saved.fold().shape == (ROWS, COLUMNS)
    assert torch.equal(saved.weight(), matrix)


@pytest.mark.parametrize("name", DIALECTS)
def test_a_record_holds_the_same_matrix(name: str, tmp_path: Path) -> None:
    """Through the fields of a record and the kernels' specification."""
    group, matrix = make(DIALECTS[name])
    entry = save(tmp_path, group, DIALECTS[name].config).fold()
    weights, tensors = entry.format.weights, {s: group[s] for s in entry.parts}
    fields = {"up": entry.format.codes(tensors)}
    fields |= {f"up{end}": value for end, value in entry.format.companions(tensors).items()}
    specs = weights.fields("up", halves=1, rows=ROWS, columns=COLUMNS, dtype="float32")
    assert {name: tuple(value.shape) for name, value in fields.items()} == {
        name: shape for name, shape, _ in specs
    }
    got = dequantise_matrix(fields, "up", weights, halves=1, columns=COLUMNS)
    assert torch.equal(got, matrix)


@pytest.mark.parametrize("name", DIALECTS)
def test_what_is_read_straight_is_the_records(name: str, tmp_path: Path) -> None:
    """Where bytes are read straight into a record, they are those that would be made of them."""
    group, _ = make(DIALECTS[name])
    format_ = save(tmp_path, group, DIALECTS[name].config).fold().format
    tensors = {suffix: value for suffix, value in group.items() if suffix not in format_.unused}
    made = {"": format_.codes(tensors), **format_.companions(tensors)}
    assert bool(format_.as_stored) != name.startswith(("gptq", "awq"))
    for suffix, ending in format_.as_stored.items():
        assert bytes_of(group[suffix]) == bytes_of(made[ending])


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", DIALECTS)
def test_one_nibble_more_or_less_shows(name: str, tmp_path: Path) -> None:
    """The control of the tests above: one flipped bit of a code changes the matrix."""
    group, matrix = make(DIALECTS[name])
    codes = next(s for s in ("weight_packed", "qweight", "weight") if s in group)
    group[codes].view(torch.uint8)[0, 0] ^= 2
    assert not torch.equal(save(tmp_path, group, DIALECTS[name].config).weight(), matrix)


@pytest.mark.parametrize("name", DIALECTS)
def test_each_missing_companion_is_named(name: str, tmp_path: Path) -> None:
    group, _ = make(DIALECTS[name])
    optional = {"input_scale", "weight_shape", "g_idx", "weight_zero_point"}
    # Without codes beside it a `scale` may be any module's; the model would miss the weight.
    optional |= {"weight"} if "scale" in group else set()
    for suffix in group.keys() - optional:
        left = {key: value for key, value in group.items() if key != suffix}
        with pytest.raises(CheckpointError) as caught:
            save(tmp_path, left, DIALECTS[name].config).fold()
        assert "`a." in caught.value.message and str(tmp_path) in caught.value.message


def test_an_unknown_companion_is_named(tmp_path: Path) -> None:
    group, _ = make(DIALECTS["fp8 blocks"])
    saved = save(tmp_path, group | {"weight_zero_point": torch.zeros(1)}, None)
    with pytest.raises(CheckpointError, match="with `weight_zero_point`"):
        saved.fold()


@pytest.mark.parametrize("name", ["int4", "fp8 blocks", "nvfp4, ModelOpt", "mxfp4, DeepSeek"])
def test_a_config_that_says_otherwise_is_refused(name: str, tmp_path: Path) -> None:
    # Groups that the shapes alone tell: this config does not speak of INT4's.
    group, _ = make(compressed_int4(size=8) if name == "int4" else DIALECTS[name])
    with pytest.raises(CheckpointError, match=r"and `.*config\.json` says `awq`"):
        save(tmp_path, group, DIALECTS["awq"].config).fold()


@pytest.mark.parametrize("name", ["int4", "fp8 blocks", "nvfp4, ModelOpt", "gptq", "awq", "mxfp8"])
def test_inverted_scales_are_refused(name: str, tmp_path: Path) -> None:
    """Weights as large as what an inverted scale makes of them are no network's."""
    group, _ = make(DIALECTS[name])
    names = ("weight_scale_2", "weight_scale_inv", "scales", "weight_scale")
    scale = next(suffix for suffix in names if suffix in group)
    inverted = group[scale]
    inverted = 254 - inverted if inverted.dtype == torch.uint8 else 1 / inverted
    saved = save(tmp_path, group | {scale: inverted}, DIALECTS[name].config)
    with pytest.raises(CheckpointError, match="weights are as large as"):
        saved.weight()


def test_scales_converted_by_value_are_refused(tmp_path: Path) -> None:
    """E8M0 bytes copied by value into integers are 0, that is 2^-127 (QN-11 of the cases)."""
    group, _ = make(DIALECTS["mxfp4, compressed-tensors"])
    group["weight_scale"].zero_()
    saved = save(tmp_path, group, DIALECTS["mxfp4, compressed-tensors"].config)
    with pytest.raises(CheckpointError, match="converted by value"):
        saved.weight()


@pytest.mark.parametrize(
    ("name", "suffix", "byte"),
    [("fp8 blocks", "weight", 0xFF), ("mxfp8", "weight_scale", 0xFF), ("mxfp8", "weight", 0x7F)],
)
def test_a_nan_among_the_codes_is_found(name: str, suffix: str, byte: int, tmp_path: Path) -> None:
    group, _ = make(DIALECTS[name])
    group[suffix].view(torch.uint8)[-1, -1] = byte
    with pytest.raises(CheckpointError, match=f"`a.{suffix}` in .* holds NaN or Inf"):
        save(tmp_path, group, DIALECTS[name].config).weight()


def test_both_dialects_of_nvfp4_mean_the_same(tmp_path: Path) -> None:
    """Bytes 0x22 (1.0, 1.0), block scale 0x40 (2.0), multiplier 0.25 or divisor 4: 0.5."""
    codes = torch.full((8, 16), 0x22, dtype=torch.uint8)
    scale = torch.full((8, 2), 0x40, dtype=torch.uint8).view(torch.float8_e4m3fn)
    theirs = {"weight": codes, "weight_scale": scale, "weight_scale_2": torch.tensor(0.25)}
    saved = save(tmp_path, theirs, None)
    assert torch.equal(saved.weight(), torch.full((8, 32), 0.5))
    ours = {
        "weight_packed": codes,
        "weight_scale": scale,
        "weight_global_scale": torch.tensor([4.0]),
    }
    assert torch.equal(save(tmp_path, ours, None).weight(), torch.full((8, 32), 0.5))


def test_blocks_of_fp8_are_clipped(tmp_path: Path) -> None:
    """200 x 136 of ones, blocks of 128, scales [[1, 2], [4, 8]]."""
    ones = torch.ones(200, 136).to(torch.float8_e4m3fn)
    group = {"weight": ones, "weight_scale_inv": torch.tensor([[1.0, 2.0], [4.0, 8.0]]) / 8}
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    weight = save(tmp_path, group, config).weight() * 8
    at = ((100, 68), (127, 127), (150, 10), (150, 130))
    assert [float(weight[place]) for place in at] == [1, 1, 4, 8]


@pytest.mark.parametrize(
    ("version", "stored", "value"), [("gptq", 7, 1.0), ("gptq_v2", 8, 1.0), ("gptq", 8, 1.0)]
)
def test_symmetric_zero_points_of_gptq_tell_their_version(
    version: str, stored: int, value: float, tmp_path: Path
) -> None:
    """Scale 0.5, code 10; a wrong label would give 0.5."""
    group = {
        "qweight": words(torch.full((16, 8), 10), 0),
        "qzeros": words(torch.full((1, 8), stored), 1),
        "scales": torch.full((1, 8), 0.5).half(),
    }
    config = {"quant_method": "gptq", "bits": 4, "sym": True, "checkpoint_format": version}
    assert torch.equal(save(tmp_path, group, config).weight(), torch.full((8, 16), value))


def test_gptq_without_a_config_is_refused(tmp_path: Path) -> None:
    group, _ = make(DIALECTS["gptq"])
    with pytest.raises(CheckpointError, match="says which version"):
        save(tmp_path, group, None).fold()


def test_other_widths_are_refused(tmp_path: Path) -> None:
    group, _ = make(DIALECTS["int4"])
    weights = {"num_bits": 2, "type": "int", "strategy": "group", "group_size": 16}
    config = {**DIALECTS["int4"].config, "config_groups": {"g": {"weights": weights}}}
    with pytest.raises(CheckpointError, match="packed with 2 bits a value"):
        save(tmp_path, group, config).fold()


def test_words_of_mixed_widths_are_told_apart_by_their_groups(tmp_path: Path) -> None:
    """Experts in INT4, attention in INT8, both packed into words: a config speaks of both."""
    eight, four = int8(packed=True), DIALECTS["int4"]
    groups = [d.config["config_groups"]["group_0"] for d in (eight, four)]
    config = {**four.config, "config_groups": {"a": groups[0], "b": groups[1]}}
    for dialect, label in ((eight, "INT8"), (four, "INT4 of compressed-tensors")):
        group, matrix = make(dialect)
        saved = save(tmp_path, group, config)
        assert saved.fold().format.label == label
        assert torch.equal(saved.weight(), matrix)


def test_a_group_size_that_is_no_number_is_refused(tmp_path: Path) -> None:
    group, _ = make(DIALECTS["int4"])
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": "16"}
    config = {**DIALECTS["int4"].config, "config_groups": {"g": {"weights": weights}}}
    with pytest.raises(CheckpointError, match="a `group_size` of `'16'`, expected a whole"):
        save(tmp_path, group, config).fold()


def test_groups_that_no_record_holds_are_refused(tmp_path: Path) -> None:
    group, _ = make(compressed_int4(size=14))
    with pytest.raises(CheckpointError, match="has 4 scales for rows of 56 values"):
        save(tmp_path, group, compressed_int4(size=14).config).fold()


def test_a_weight_in_two_forms_is_refused(tmp_path: Path) -> None:
    tensors = {
        "m.gate_up_proj_blocks": pairs(torch.zeros(16, 32, dtype=torch.int32)).view(2, 8, 1, 16),
        "m.gate_up_proj_scales": torch.full((2, 8, 1), 120, dtype=torch.uint8),
        "m.gate_up_proj": torch.zeros(2, 32, 8),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="is there unquantised, and as MXFP4 too"):
        fold(CheckpointIndex.read(tmp_path), None)
