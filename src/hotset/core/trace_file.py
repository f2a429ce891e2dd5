"""Our trace file: written while a model runs, bounded, readable up to the last whole frame.

Little-endian throughout:

    magic "HOTTRACE", u32 version, u32 header bytes, u32 crc32 of the header, header (JSON)
    frames: u8 kind, u32 sequence, u32 tokens, u32 payload bytes, u32 crc32 of all else, payload

A frame of kind 1 opens a sequence (payload: JSON with `domain`). One of kind 2 carries tokens of
an open sequence (payload: zlib of ids [L, K, T] as uint8 or uint16, then token ids [T] as int32 if
the header says so). Sequences may interleave, as a server's do. Ids are transposed, because one
layer's ids resemble each other more than one token's: a sixth smaller. No text is ever stored.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from hotset.core.closing import Closing
from hotset.core.errors import CheckpointError, ConfigError
from hotset.core.fingerprint import ModelFingerprint
from hotset.core.slot_pools import IntArray
from hotset.core.trace import Trace, TraceInfo, TraceSequence, check_trace, id_dtype
from hotset.core.units import MIB, format_bytes

MAGIC = b"HOTTRACE"
VERSION = 1
FRAME_TOKENS = 256
DEFAULT_MAX_BYTES = 256 * MIB

_HEAD = struct.Struct("<III")
_FRAME = struct.Struct("<BIII")
_CRC = struct.Struct("<I")
_FRAME_BYTES = _FRAME.size + _CRC.size
_OPEN, _TOKENS = 1, 2


class TraceWriter(Closing):
    """Records routed ids into a file as they come.

    Args:
        path: is created; an existing file is replaced.
        info: written into the header.
        with_token_ids: token ids are stored too. Off by default: they are the text.
        max_bytes: recording stops before the file grows beyond it, see `full`.

    Attributes:
        full: the bound was reached; nothing more is recorded.
        num_bytes: size of the file.
    """

    def __init__(
        self,
        path: Path | str,
        info: TraceInfo,
        *,
        with_token_ids: bool = False,
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> None:
        fingerprint = info.fingerprint
        self._dtype = id_dtype(max(fingerprint.num_experts))
        self._shape = (len(fingerprint.num_experts), max(fingerprint.top_k))
        self._with_token_ids, self._max_bytes = with_token_ids, max_bytes
        header = json.dumps(
            {
                "fingerprint": fingerprint.to_json(),
                "model": info.model,
                "source": info.source,
                "license": info.license,
                "token_ids": with_token_ids,
            }
        ).encode()
        head = MAGIC + _HEAD.pack(VERSION, len(header), zlib.crc32(header)) + header
        if len(head) > max_bytes:
            raise ConfigError(
                f"a trace of at most {format_bytes(max_bytes)} has no room for its header"
            )
        self._file: BinaryIO = Path(path).open("wb")  # noqa: SIM115 - closed in `close`
        self._file.write(head)
        self.num_bytes, self.full = len(head), False
        self._num_sequences = 0
        self._pending: dict[int, list[tuple[NDArray[Any], NDArray[Any]]]] = {}

    def open_sequence(self, domain: str = "") -> int:
        """Starts a sequence and returns its number."""
        sequence = self._num_sequences
        self._num_sequences += 1
        self._pending[sequence] = []
        self._write(_OPEN, sequence, 0, json.dumps({"domain": domain}).encode())
        return sequence

    def append(self, sequence: int, ids_TLK: IntArray, token_ids_T: IntArray | None = None) -> bool:
        """Records tokens of an open sequence.

        Args:
            ids_TLK: routed ids; -1 pads layers with a smaller top-k.
            token_ids_T: needed if and only if the writer stores them.

        Returns:
            False once the file is full, and these tokens were dropped.
        """
        assert sequence in self._pending, f"sequence {sequence} is not open"
        assert ids_TLK.shape[1:] == self._shape, f"ids {ids_TLK.shape}, expected [T, L, K]"
        assert (token_ids_T is not None) == self._with_token_ids, "token ids against the header"
        if self.full:
            return False
        padded = np.where(ids_TLK < 0, np.iinfo(self._dtype).max, ids_TLK).astype(self._dtype)
        tokens = np.zeros(0, np.int32) if token_ids_T is None else np.array(token_ids_T, np.int32)
        self._pending[sequence].append((padded, tokens))
        if sum(len(ids) for ids, _ in self._pending[sequence]) >= FRAME_TOKENS:
            self._flush(sequence)
        return not self.full

    def close_sequence(self, sequence: int) -> None:
        """Writes what is pending of a sequence; nothing more can be appended to it."""
        self._flush(sequence)
        del self._pending[sequence]

    def close(self) -> None:
        """Writes what is pending and closes the file. May be called twice."""
        if not self._file.closed:
            for sequence in list(self._pending):
                self.close_sequence(sequence)
            self._file.close()

    def _flush(self, sequence: int) -> None:
        if not self._pending[sequence]:
            return
        ids, tokens = (
            np.concatenate(parts) for parts in zip(*self._pending[sequence], strict=True)
        )
        self._pending[sequence] = []
        raw = np.ascontiguousarray(ids.transpose(1, 2, 0)).astype(self._dtype.newbyteorder("<"))
        payload = zlib.compress(raw.tobytes() + tokens.astype("<i4").tobytes(), level=6)
        self._write(_TOKENS, sequence, len(ids), payload)

    def _write(self, kind: int, sequence: int, num_tokens: int, payload: bytes) -> None:
        size = _FRAME_BYTES + len(payload)
        if self.full or self.num_bytes + size > self._max_bytes:
            self.full = True
            return
        head = _FRAME.pack(kind, sequence, num_tokens, len(payload))
        self._file.write(head + _CRC.pack(zlib.crc32(head + payload)) + payload)
        self._file.flush()
        self.num_bytes += size


@dataclass(frozen=True)
class _Frame:
    offset: int
    kind: int
    sequence: int
    num_tokens: int
    payload: bytes


def read_trace(path: Path, *, salvage: bool = False) -> Trace:
    """Reads a file of `TraceWriter`.

    Args:
        salvage: a tail that was cut off or damaged is left out instead of being an error.

    Raises:
        CheckpointError: damaged, of another version, or (without `salvage`) cut off.
    """
    data = path.read_bytes()
    info, with_token_ids, offset = _read_header(data, path)
    frames: list[_Frame] = []
    try:
        frames.extend(_frames(data, offset, path))
    except CheckpointError:
        if not salvage:
            raise
        frames = list(_frames(data, offset, path, stop_at_damage=True))
    return _assemble(frames, info, with_token_ids, path)


def _read_header(data: bytes, path: Path) -> tuple[TraceInfo, bool, int]:
    start = len(MAGIC) + _HEAD.size
    if len(data) < start or not data.startswith(MAGIC):
        raise CheckpointError(f"`{path}` is not a trace, or is cut off at byte {len(data)}")
    version, size, crc = _HEAD.unpack_from(data, len(MAGIC))
    if version != VERSION:
        raise CheckpointError(
            f"`{path}` is a trace of version {version}, this program reads {VERSION}"
        )
    raw = data[start : start + size]
    if len(raw) != size or zlib.crc32(raw) != crc:
        raise CheckpointError(f"`{path}`: the header is damaged")
    header = json.loads(raw)
    info = TraceInfo(
        ModelFingerprint.from_json(header.get("fingerprint"), where=str(path)),
        model=header.get("model", ""),
        source=header.get("source", ""),
        license=header.get("license", ""),
    )
    return info, bool(header.get("token_ids")), start + size


def _frames(
    data: bytes, offset: int, path: Path, *, stop_at_damage: bool = False
) -> Iterator[_Frame]:
    while offset < len(data):
        damage, body = "", offset + _FRAME_BYTES
        if body > len(data):
            damage = "is cut off"
        else:
            head = data[offset : offset + _FRAME.size]
            kind, sequence, num_tokens, size = _FRAME.unpack(head)
            (crc,) = _CRC.unpack_from(data, offset + _FRAME.size)
            payload = data[body : body + size]
            if len(payload) != size:
                damage = "is cut off"
            elif zlib.crc32(head + payload) != crc or kind not in (_OPEN, _TOKENS):
                damage = "is damaged"
        if damage and stop_at_damage:
            return
        if damage:
            raise CheckpointError(
                f"`{path}` {damage} in the frame at byte {offset} of {len(data)}",
                hint="the whole frames before it can be read with `read_trace(..., salvage=True)`",
            )
        yield _Frame(offset, kind, sequence, num_tokens, payload)
        offset = body + size


def _assemble(frames: list[_Frame], info: TraceInfo, with_token_ids: bool, path: Path) -> Trace:
    fingerprint = info.fingerprint
    layers, top_k = len(fingerprint.num_experts), max(fingerprint.top_k)
    dtype = id_dtype(max(fingerprint.num_experts))
    domains: dict[int, str] = {}
    parts: dict[int, list[tuple[NDArray[Any], NDArray[Any]]]] = {}
    for frame in frames:
        if frame.kind == _OPEN:
            domains[frame.sequence] = str(json.loads(frame.payload).get("domain", ""))
            parts[frame.sequence] = []
            continue
        num_ids = frame.num_tokens * layers * top_k
        try:
            raw = zlib.decompress(frame.payload)
            ids = np.frombuffer(raw, dtype.newbyteorder("<"), count=num_ids)
            tokens = np.frombuffer(raw, "<i4", offset=num_ids * dtype.itemsize)
            ids = ids.reshape(layers, top_k, frame.num_tokens).transpose(2, 0, 1).astype(dtype)
            parts[frame.sequence].append((ids, tokens.astype(np.int32)))
        except (zlib.error, ValueError, KeyError) as error:
            raise CheckpointError(
                f"`{path}`: the frame at byte {frame.offset} does not fit the header: {error!r}"
            ) from error
    sequences, start = [], 0
    for number in sorted(parts):
        length = sum(len(ids) for ids, _ in parts[number])
        if length:
            sequences.append(TraceSequence(number, start, length, domains[number]))
            start += length
    whole = [part for number in sorted(parts) for part in parts[number]]
    if not whole:
        raise CheckpointError(f"`{path}` holds no tokens")
    ids_TLK, token_ids = (np.concatenate(arrays) for arrays in zip(*whole, strict=True))
    trace = Trace(info, ids_TLK, tuple(sequences), token_ids if with_token_ids else None)
    return check_trace(trace, where=str(path))
