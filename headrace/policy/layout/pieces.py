"""Rows of the tensors of a checkpoint, read where they are needed: no process has to hold a whole checkpoint.

The idea: each process of a trainer reads the rows that it holds. A row range of a Hugging Face tensor is a range of its
first dimension in the file as well, also where the file has weights in eight bits (elements and scales, or blocks
and their factors). One file at a time is mapped, and only the wanted rows of it are read.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
from torch import Tensor

from headrace.policy.config import CheckpointError, PolicyConfig
from headrace.policy.layout import block_fp8, checkpoint, formats, hugging_face
from headrace.policy.layout.names import check_names


class Pieces:
    """The tensors of a checkpoint folder, or of a file with published names, under the names of `names.views`."""

    def __init__(self, config: PolicyConfig, path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Read the files' headers. shapes: of every tensor that the policy has. CheckpointError when a file cannot be
        read, or when a tensor is missing, left over or of another shape."""
        self._config, self._path, self._shapes = config, path, shapes
        self._stored: dict[str, tuple[Path, list[int]]] = {}
        self._blocks = block_fp8.blocks(hugging_face.raw_of(path)) if path.is_dir() else None
        packed: set[str] = set()
        self._mapped: tuple[Path, Any] | None = None
        self.read_bytes = 0
        """Bytes of tensors that were read."""
        try:
            for file in checkpoint.files(path):
                opened = self._open(file)
                for name in opened.keys():
                    part = opened.get_slice(name)
                    self._stored[name] = file, part.get_shape()
                    packed |= {name} if part.get_dtype() == "F8_E4M3" else set()
        except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
            raise CheckpointError(f"{path}: weights cannot be read: {error}") from None
        for name in checkpoint.not_of_run(config, self._stored):
            del self._stored[name]
        self._sources = {name: [each for each in self._named(name) if each in self._stored] for name in shapes}
        self._check()
        for name, sources in self._sources.items():
            if name in packed and sources == [name]:
                raise block_fp8.missing(name)

    @property
    def whole(self) -> bool:
        """Whether the files have every tensor of the policy under its name."""
        return all(self._sources.values())

    def _open(self, file: Path) -> Any:
        """A file of the checkpoint, mapped until another one is opened."""
        if self._mapped is None or self._mapped[0] != file:
            self._mapped = None
            self._mapped = file, safetensors.safe_open(file, "pt")
        return self._mapped[1]

    def _named(self, name: str) -> list[str]:
        """The names that parts of a tensor may have in a file."""
        suffixes = kind.suffixes if (kind := formats.form(self._config, name)) else ("",)
        named = [name + suffix for suffix in suffixes]
        return named + ([name + block_fp8.SCALES] if self._blocks else [])

    def _check(self) -> None:
        used = {source for sources in self._sources.values() for source in sources}
        missing = [name for name, sources in self._sources.items() if not sources]
        extra = [name for name in self._stored if name not in used]
        if not self._config.source:
            check_names(missing, extra)
        elif missing and (
            self._blocks or not extra
        ):  # the library also reads names of older folders, so that others may stand for them
            check_names(missing, ())
        for name, sources in self._sources.items():
            for source in sources:
                got, wanted = self._stored[source][1], list(self._shapes[name])
                if self._blocks and source != name:
                    wanted = self._blocks.shape(wanted) if len(wanted) == 2 else [1]
                alike = got == wanted if self._blocks or sources == [name] else got[:1] == wanted[:1]
                if not alike:
                    raise CheckpointError(f"{source}: expected shape {wanted}, got {got}")

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """Rows `first` to `first + count` of a tensor, the whole of one without dimensions; quantised ones as numbers
        of the policy's dtype, others in the dtype of the file. CheckpointError as the constructor."""
        parts: dict[str, Tensor] = {}
        for source in self._sources[name]:
            place = slice(first, first + count)
            if self._blocks is not None and source != name:
                place = self._blocks.of(first, count)
            opened = self._open(self._stored[source][0])
            parts[source] = opened.get_slice(source)[place] if self._shapes[name] else opened.get_tensor(source)
            self.read_bytes += parts[source].nbytes
        if self._blocks is not None and (factors := parts.pop(name + block_fp8.SCALES, None)) is not None:
            parts[name] = self._blocks.widened(parts[name], factors, first, self._config.torch_dtype)
        value = formats.unpack(self._config, parts)[name]
        wanted = [count, *self._shapes[name][1:]] if self._shapes[name] else []
        if list(value.shape) != wanted:
            raise CheckpointError(f"{name}: expected shape {wanted} of some rows, got {list(value.shape)}")
        return value
