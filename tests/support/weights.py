"""Weights for tests: bit patterns of every kind, and steps that change some of them."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headrace.messages.weights import ChunkInfo, WeightManifest
from headrace.weights import tensor_state
from headrace.weights.publishing.encoding import Encoding, describe
from headrace.weights.snapshot import Snapshot
from headrace.weights.state import Bits

DENSITIES = (0.0, 1e-5, 0.001, 0.01, 0.06, 0.3, 0.7, 1.0)


def weights(rng: np.random.Generator, count: int, dtype: str = "BF16") -> Bits:
    """Bits of normal weights of scale 0.02."""
    values = torch.from_numpy(rng.standard_normal(count).astype(np.float32) * 0.02)
    return tensor_state.bits(values.to(tensor_state.DTYPES[dtype])).copy()


def stepped(rng: np.random.Generator, base: Bits, density: float) -> Bits:
    """A step of a few units in the last place on a share of the elements, sometimes a large one."""
    target = base.copy()
    hit = np.flatnonzero(rng.random(base.size) < density)
    steps = rng.choice([1, -1, 2, -2, 9, -300], hit.size, p=[0.44, 0.44, 0.04, 0.04, 0.03, 0.01])
    target[hit] += steps.astype(np.int64).astype(base.dtype)
    return target


def model(seed: int = 1, wide: int = 300) -> dict[str, Tensor]:
    """A small model's tensors in several dtypes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(wide, 64, generator=generator).bfloat16(),
        "layers.0.up": (torch.randn(64, 256, generator=generator) * 0.05).bfloat16(),
        "layers.0.norm": torch.ones(64),
        "layers.0.scale": torch.randint(0, 255, (64,), generator=generator, dtype=torch.uint8),
        "layers.0.down": (torch.randn(256, 64, generator=generator) * 0.05).half(),
    }


def step(tensors: Mapping[str, Tensor], seed: int, density: float = 0.02) -> dict[str, Tensor]:
    """The model after a step of that density."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, tensor in tensors.items():
        bits = stepped(rng, tensor_state.bits(tensor), density)
        out[name] = torch.from_numpy(bits.view(np.uint8).copy()).view(tensor.dtype).reshape(tensor.shape)
    return out


class Chain:
    """Versions as files in a folder and as manifests with their chunks: what a sender would have published."""

    def __init__(self, folder: Path, codec: str = "d8-zstd"):
        self.folder, self.codec = folder, codec
        self.manifests: list[WeightManifest] = []
        self.chunks: dict[int, bytes] = {}
        self.states: list[dict[str, Tensor]] = []
        self._seq = 0

    def path(self, version: int) -> Path:
        """The trainer's file of a version."""
        return self.folder / f"{version}.safetensors"

    def publish(self, tensors: dict[str, Tensor], *, full: bool = False) -> WeightManifest:
        """The next version, as a delta when it can be one."""
        version = len(self.states)
        self.states.append(tensors)
        tensor_state.write(self.path(version), tensors)
        base = None if full or not version else Snapshot(self.path(version - 1))
        encoding = Encoding(Snapshot(self.path(version)), base, name=self.codec)
        infos: list[ChunkInfo] = []
        for data in encoding.chunks():
            self._seq += 1
            self.chunks[self._seq] = data
            infos.append(describe(data, 0, len(infos), self._seq))
        self._seq += 1
        before = self.manifests[-1] if base is not None else None
        manifest = encoding.manifest("r1", version, infos, base=before, base_seq=0 if base is None else self._seq - 1)
        self.manifests.append(manifest)
        return manifest
