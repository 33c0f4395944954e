"""Writes the checkpoint that a server loads: one folder in memory, updated while the server serves.

Idea: the receiver has applied the delta and verified a file in the node's store. A reload needs the same bits in memory
and in Hugging Face layout. So the folder is in tmpfs, and a new version rewrites only the blocks of model.safetensors
that differ. The file is hashed again afterwards: either the server will read the bits that the trainer published, or
the version is refused before any request is paused.

The path never changes, because the server renames its model after every path that it loads. There is one copy and not
two: an older version is written again from the store.
"""

import json
import os
from pathlib import Path

from headrace.engines.base import EngineError, RefusedVersion
from headrace.policy.config import PolicyConfig
from headrace.policy.layout import hugging_face
from headrace.weights import snapshot
from headrace.weights.state import WeightError

BLOCK = 1 << 20
TOKENIZER = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1 << 20}
"""Without an end-of-sequence token, so that a turn ends only at the stop ids of its request."""


class Stage:
    """A folder with config.json, tokenizer files and one version's model.safetensors."""

    def __init__(self, folder: str | Path, config: PolicyConfig, tokenizer: Path | None = None) -> None:
        """tokenizer: the run's tokenizer.json; without one the server must be started with --skip-tokenizer-init."""
        self.folder = Path(folder)
        self._config, self._tokenizer = config, tokenizer
        self.written_bytes = 0
        """Bytes that the last `put` wrote."""

    @property
    def model(self) -> Path:
        """The file with the weights."""
        return self.folder / "model.safetensors"

    def put(self, version: int, path: str, state_hash: str) -> None:
        """Write a version into the folder. Blocks. EngineError when the file cannot be read or there is no space,
        RefusedVersion when the file is not that version."""
        try:
            self._describe()
            self.written_bytes = _copy_differences(Path(path), self.model)
            written = snapshot.file_hash(self.model)
        except (OSError, WeightError) as error:
            kind = RefusedVersion if isinstance(error, WeightError) else EngineError
            raise kind(f"version {version} cannot be staged from {path}: {error}") from error
        if written != state_hash:
            raise RefusedVersion(f"version {version} from {path} has state hash {written}, expected {state_hash}")

    def _describe(self) -> None:
        """Write config.json and the tokenizer files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # transformers gives a Llama, Mistral or DeepSeek without this field an end of its own, id 2 or 1.
        shape = json.loads(self._config.source) if self._config.source else hugging_face.as_json(self._config)
        shape["eos_token_id"] = None
        texts = {"config.json": json.dumps(shape, indent=2) + "\n"}
        if self._tokenizer is not None:
            texts["tokenizer.json"] = self._tokenizer.read_text(encoding="utf-8")
            texts["tokenizer_config.json"] = json.dumps(TOKENIZER) + "\n"
        for name, text in texts.items():
            file = self.folder / name
            if not file.exists() or file.read_text(encoding="utf-8") != text:
                part = self.folder / f".{name}.part"
                part.write_text(text, encoding="utf-8")
                os.replace(part, file)

    def remove(self) -> None:
        """Delete the folder's files, which frees their memory."""
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
            (self.folder / name).unlink(missing_ok=True)
        if self.folder.exists() and not any(self.folder.iterdir()):
            self.folder.rmdir()


def _copy_differences(source: Path, target: Path) -> int:
    """Make `target` equal to `source` by writing only blocks that differ. Returns the number of bytes written."""
    written = 0
    with open(source, "rb", buffering=0) as new, open(target, "a+b", buffering=0) as old:
        descriptor = old.fileno()
        size = os.fstat(new.fileno()).st_size
        common = min(size, os.fstat(descriptor).st_size)
        if common < size:
            os.posix_fallocate(descriptor, 0, size)
        os.ftruncate(descriptor, size)
    # Opened again, because with O_APPEND every positioned write would append.
    with open(source, "rb", buffering=0) as new, open(target, "r+b", buffering=0) as old:
        at = 0
        while block := new.read(BLOCK):
            if at + len(block) > common or os.pread(old.fileno(), len(block), at) != block:
                view = memoryview(block)
                while view:
                    view = view[os.pwrite(old.fileno(), view, at + len(block) - len(view)) :]
                written += len(block)
            at += len(block)
    return written
