"""The checkpoint that a server loads: a folder whose weights are a link to the verified file of this node.

Idea: the receiver has a verified file in Hugging Face layout in the node's store (`config.versions.folder`, in memory
where `weights.memory_dir` names such a folder). So no byte is copied, whatever the number of servers, and the link
keeps the file when the store drops it. The file is hashed once for all servers of a node: either they will read the
bits that the trainer published, or the version is refused before any request is paused.

The path never changes, because the server renames its model after every path that it loads.

A policy with adapters is two things here: the weights under them, written once, which the server starts with, and the
adapter of a version as a PEFT folder, which it loads on top. They are copies: the file has both.
"""

import json
import os
import shutil
import threading
from pathlib import Path

import msgspec
from safetensors.torch import save_file

from headrace.engines.base import EngineError, RefusedVersion
from headrace.policy.adapters import low_rank, peft
from headrace.policy.config import PolicyConfig
from headrace.policy.layout import hugging_face
from headrace.weights import snapshot, tensor_state
from headrace.weights.state import WeightError

ADAPTER = "adapter"
"""The folder with a version's adapter, inside the checkpoint's folder."""
RECENT = 4
"""Number of files that are known."""
TOKENIZER = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1 << 20}
"""Without an end-of-sequence token, so that a turn ends only at the stop ids of its request."""


class Verified:
    """Files whose bits were hashed, for all servers of a node. A file is known by its inode: it never changes."""

    def __init__(self) -> None:
        self._hashing = threading.Lock()
        self._known: dict[tuple[int, int, int], str] = {}

    def require(self, path: Path, state_hash: str) -> None:
        """WeightError unless the file has this state; OSError. Other threads wait while one hashes."""
        with self._hashing:
            info = path.stat()
            key = info.st_dev, info.st_ino, info.st_mtime_ns
            if (found := self._known.get(key)) is None:
                found = self._known[key] = snapshot.file_hash(path)
                while len(self._known) > RECENT:
                    del self._known[next(iter(self._known))]
        if found != state_hash:
            raise WeightError(f"it has state hash {found}, expected {state_hash}")


class Stage:
    """A folder with config.json, tokenizer files and one version's model.safetensors."""

    def __init__(self, folder: str | Path, config: PolicyConfig, tokenizer: Path | None = None) -> None:
        """tokenizer: the run's tokenizer.json; without one the server must be started with --skip-tokenizer-init."""
        self.folder = Path(folder)
        self._config, self._tokenizer = config, tokenizer

    @property
    def model(self) -> Path:
        """The file with the weights."""
        return self.folder / "model.safetensors"

    def put(self, version: int, path: str, state_hash: str, verified: Verified | None = None) -> None:
        """Link a version into the folder. Blocks. verified: what is known of files of this node.

        EngineError when the file is gone or on another file system, RefusedVersion when it is not that version.
        """
        part = self.folder / ".model.part"
        try:
            self._describe()
            part.unlink(missing_ok=True)
            os.link(path, part)
            (verified or Verified()).require(part, state_hash)
            if self._config.adapter:
                self._divide(part)
            else:
                os.replace(part, self.model)
        except (OSError, WeightError) as error:
            kind = RefusedVersion if isinstance(error, WeightError) else EngineError
            raise kind(f"version {version} cannot be staged from {path}: {error}") from error
        finally:
            part.unlink(missing_ok=True)  # os.replace keeps both names of one file

    def _divide(self, version: Path) -> None:
        """Write the adapter of a version as a PEFT folder, and once what is under it, which no version changes."""
        tensors = tensor_state.read(version)
        peft.write(self._config, tensors, str(self.folder), self.folder / ADAPTER)
        if not self.model.exists():
            part = self.folder / ".base.part"
            save_file({name: t for name, t in tensors.items() if not low_rank.is_published(name)}, part)
            os.replace(part, self.model)

    def _describe(self) -> None:
        """Write config.json and the tokenizer files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # transformers gives a Llama, Mistral or DeepSeek without this field an end of its own, id 2 or 1.
        bare = msgspec.structs.replace(self._config, adapter=None)
        shape = json.loads(bare.source) if bare.source else hugging_face.as_json(bare)
        shape |= {**hugging_face.older(shape), "eos_token_id": None}
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
        shutil.rmtree(self.folder / ADAPTER, ignore_errors=True)
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
            (self.folder / name).unlink(missing_ok=True)
        if self.folder.exists() and not any(self.folder.iterdir()):
            self.folder.rmdir()
