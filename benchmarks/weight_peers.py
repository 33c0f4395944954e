"""Other codecs for two versions of a tensor, on the same bytes: full snapshots, XOR, zstd's delta, Fireworks'.

Every entry is (compress(base, new) -> blob, decompress(base, blob) -> new) over flat byte arrays of one tensor.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import lz4.frame
import numpy as np
import torch
import zstandard
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class Peer(NamedTuple):
    """A codec to compare with. `slice_bytes`: largest input of a codec that is too slow for whole tensors."""

    name: str
    compress: Callable[[Bytes, Bytes], Any]
    decompress: Callable[[Bytes, Any], Bytes]
    size: Callable[[Any], int] = len
    slice_bytes: int = 0


_zstd = zstandard.ZstdCompressor(level=1)
_unzstd = zstandard.ZstdDecompressor()


def _array(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)


def _patch_to(base: Bytes, new: Bytes) -> bytes:
    window = zstandard.ZstdCompressionParameters.from_level(1, window_log=27, enable_ldm=True)
    words = zstandard.ZstdCompressionDict(base.tobytes(), dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    return zstandard.ZstdCompressor(compression_params=window, dict_data=words).compress(new.data)


def _patch_from(base: Bytes, blob: bytes) -> Bytes:
    words = zstandard.ZstdCompressionDict(base.tobytes(), dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    return _array(zstandard.ZstdDecompressor(dict_data=words, max_window_size=1 << 27).decompress(blob))


def peers() -> list[Peer]:
    """The codecs that are installed on this machine."""
    out = [
        Peer("full_lz4", lambda b, n: lz4.frame.compress(n.data), lambda b, z: _array(lz4.frame.decompress(z))),
        Peer("full_zstd", lambda b, n: _zstd.compress(n.data), lambda b, z: _array(_unzstd.decompress(z))),
        Peer("xor_zstd", lambda b, n: _zstd.compress((b ^ n).data), lambda b, z: b ^ _array(_unzstd.decompress(z))),
        Peer("zstd_patch_from", _patch_to, _patch_from, slice_bytes=16 << 20),
    ]
    try:
        from fireworks_delta_compression import (  # type: ignore[import-not-found, unused-ignore]
            delta_compress,
            delta_decompress,
        )
    except ImportError:
        return out

    def bf16(flat: Bytes) -> torch.Tensor:
        return torch.from_numpy(flat).view(torch.bfloat16)

    def arc(kind: str) -> Peer:
        def compress(base: Bytes, new: Bytes) -> Any:
            return delta_compress(src=bf16(base), dst=bf16(new), compression_format=kind)

        def decompress(base: Bytes, blob: Any) -> Bytes:
            new = delta_decompress(src=bf16(base), compressed_diff=blob[0], checksum=blob[1], compression_format=kind)
            return np.asarray(new.view(torch.uint8).numpy())

        return Peer(f"fireworks_{kind}", compress, decompress, lambda blob: int(blob[0].numel()))

    return [*out, arc("arc_v2"), arc("arc_v3")]
