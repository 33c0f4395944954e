"""Pins the judge of a run: the hash of the judge model, and the record by which all judges of a run agree."""

import hashlib
from pathlib import Path

from headrace.judging.rubrics.rubric import RubricError
from headrace.messages.plugins import Plugin

_CHUNK = 1 << 20


def folder_hash(folder: Path) -> str:
    """sha256 over names and contents of all files of a model's folder, hidden ones aside. RubricError."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    names = {path.relative_to(folder).as_posix(): path for path in paths}
    shown = {name: path for name, path in names.items() if not any(part.startswith(".") for part in name.split("/"))}
    if not any(name.endswith((".safetensors", ".gguf")) for name in shown):
        raise RubricError(
            f"[judge] model_folder {folder} holds no *.safetensors or *.gguf file: expected the folder of the weights "
            "that the endpoint serves"
        )
    whole = hashlib.sha256()
    for name, path in sorted(shown.items()):
        file_digest = hashlib.sha256()
        try:
            with path.open("rb") as file:
                while data := file.read(_CHUNK):
                    file_digest.update(data)
        except OSError as error:
            raise RubricError(f"[judge] model_folder {path} cannot be read: {error.strerror}") from None
        whole.update(f"{name}\0{file_digest.hexdigest()}\0".encode())
    return whole.hexdigest()


def model_hash(model: str, folder: str) -> str:
    """The hash that pins a judge model: of its folder, else of the name that the endpoint knows it by. RubricError."""
    return folder_hash(Path(folder)) if folder else hashlib.sha256(model.encode()).hexdigest()


def pinned(digest: str) -> Plugin:
    """The record of a run's judge. digest: of model hash, settings, criteria and card."""
    return Plugin(seam="rubrics", name="judge", source=digest)
