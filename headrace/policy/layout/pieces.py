"""Rows of the tensors of a checkpoint, read where they are needed: no process has to hold a whole checkpoint.

The idea: each process of a trainer reads the rows that it holds. A row range of a Hugging Face tensor is a range of its
first dimension in the file as well, also where the file has experts in eight bits (elements and scales). One file at a
time is mapped, of which the rows alone are read.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import safetensors
from torch import Tensor

from headrace.policy.config import CheckpointError, PolicyConfig
from headrace.policy.layout import checkpoint, formats
from headrace.policy.layout.names import check_names
from headrace.policy.numerics import Numerics
from headrace.policy.provider import build


def refuse(config: PolicyConfig, path: Path) -> None:
    """CheckpointError where a folder's files lack a part of this policy, by their headers: no tensor is read."""
    numerics = Numerics(exact=False, reason="it computes nothing", fingerprint="")
    config = msgspec.structs.replace(config, adapter=None)
    shapes = {name: tuple(view.shape) for name, view in build(config, numerics, device="meta").views().items()}
    Pieces(config, path, shapes)


class Pieces:
    """The tensors of a checkpoint folder, or of a file with published names, under the names of `names.views`."""

    def __init__(self, config: PolicyConfig, path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Read the files' headers. shapes: of every tensor that the policy has. CheckpointError when a file cannot be
        read, or when a tensor is missing, left over or of another shape."""
        self._config, self._path, self._shapes = config, path, shapes
        self._stored: dict[str, tuple[Path, list[int]]] = {}
        self._mapped: tuple[Path, Any] | None = None
        self.read_bytes = 0
        """Bytes of tensors that were read."""
        try:
            for file in checkpoint.files(path):
                opened = self._open(file)
                self._stored |= {name: (file, opened.get_slice(name).get_shape()) for name in opened.keys()}
        except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
            raise CheckpointError(f"{path}: weights cannot be read: {error}") from None
        for name in checkpoint.not_of_run(config, self._stored):
            del self._stored[name]
        self._sources = {name: [each for each in self._named(name) if each in self._stored] for name in shapes}
        self._check()

    def _open(self, file: Path) -> Any:
        """A file of the checkpoint, mapped until another one is opened."""
        if self._mapped is None or self._mapped[0] != file:
            self._mapped = None
            self._mapped = file, safetensors.safe_open(file, "pt")
        return self._mapped[1]

    def _named(self, name: str) -> list[str]:
        """The names that parts of a tensor may have in a file."""
        suffixes = kind.suffixes if (kind := formats.form(self._config, name)) else ("",)
        return [name + suffix for suffix in suffixes]

    def _check(self) -> None:
        used = {source for sources in self._sources.values() for source in sources}
        missing = [name for name, sources in self._sources.items() if not sources]
        extra = [name for name in self._stored if name not in used]
        if not self._config.source:
            check_names(missing, extra)
        elif missing and not extra:  # the library also reads names of older folders, so that others may stand for them
            check_names(missing, ())
        for name, sources in self._sources.items():
            for source in sources:
                got, wanted = self._stored[source][1], list(self._shapes[name])
                alike = got == wanted if sources == [name] else got[:1] == wanted[:1]
                if not alike:
                    raise CheckpointError(f"{source}: expected shape {wanted}, got {got}")

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """Rows `first` to `first + count` of a tensor: quantised ones as numbers of the policy's dtype, others in the
        dtype of the file. CheckpointError as the constructor."""
        parts: dict[str, Tensor] = {}
        for source in self._sources[name]:
            parts[source] = self._open(self._stored[source][0]).get_slice(source)[first : first + count]
            self.read_bytes += parts[source].nbytes
        value = formats.unpack(self._config, parts)[name]
        wanted = [count, *self._shapes[name][1:]]
        if list(value.shape) != wanted:
            raise CheckpointError(f"{name}: expected shape {wanted} of some rows, got {list(value.shape)}")
        return value
