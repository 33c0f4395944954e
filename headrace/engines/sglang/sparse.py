"""Writes a version as its changed elements, for a loader that runs inside the server (`inside_server`).

Idea: between consecutive versions one weight in a hundred changes; a reload from disk copies all of them while requests
wait. So the differences are computed during serving, in the server's own names and layout (`checksums.fused`), and
written to the staged folder; the pause contains one scattered write. The server's checksums are compared as after a
reload, so a wrong difference, or one against other weights than the server holds, is detected and followed by a reload.

Trade-off: both versions are held in memory while they are compared, and it works only where the layout inside the
server is known (one rank, nothing quantised). Elsewhere the version is loaded from disk.
"""

import asyncio
import base64
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from headrace.engines.base import EngineError
from headrace.engines.server.backend import UPDATE_S, Terms
from headrace.engines.server.http import ServerError, Wire
from headrace.engines.server.weights.checksums import fused
from headrace.engines.server.weights.lock import VersionFile
from headrace.policy.config import PolicyConfig
from headrace.weights import tensor_state

LOADER = "headrace_loader.apply"
FOLDER = Path(__file__).parent / "inside_server"
"""The folder that the server needs on its PYTHONPATH."""
MOST = 0.25
"""Share of changed elements above which the whole version is loaded: an index has more bytes than a weight."""


class _Nothing:
    """Unpickles as an empty parameter: the server's unpickler admits only a few names, and a tensor's data is not among
    them."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return torch.nn.Parameter, ()


def write(file: Path, before: Path, after: Path, config: PolicyConfig, dtype: str) -> int:
    """Write the elements in which version file `after` differs from `before`, as the server holds them in `dtype`.

    Returns the bytes of the file; 0, without a file, when too many elements differ or shapes differ.
    """
    kind = getattr(torch, dtype)
    old, new = (fused(tensor_state.read(path), config) for path in (before, after))
    out, sizes, changed, whole = {}, {}, 0, 0
    for name, tensor in new.items():
        was, now = old[name].to(kind).flatten(), tensor.to(kind).flatten()
        if was.shape != now.shape:
            return 0
        # Bits, not values: zero has two signs.
        at = (was.view(torch.int16 if was.element_size() == 2 else torch.int32)
              != now.view(torch.int16 if now.element_size() == 2 else torch.int32)).nonzero().flatten()  # fmt: skip
        whole, changed = whole + now.numel(), changed + at.numel()
        if at.numel():
            out[f"{name}.at"], out[f"{name}.to"], sizes[name] = at, now[at].contiguous(), str(now.numel())
    if changed > MOST * whole:
        return 0
    save_file(out, file, metadata=sizes)
    return file.stat().st_size


def body(file: Path, label: str) -> dict[str, Any]:
    """The JSON of POST /update_weights_from_tensor that makes the loader apply a file."""
    payload = pickle.dumps([(str(file), _Nothing())])
    return {
        "serialized_named_tensors": [base64.b64encode(payload).decode()],
        "load_format": LOADER,
        "flush_cache": False,
        "weight_version": label,
    }


class Sparse:
    """The changed elements as a `backend.Way`."""

    def __init__(self, wire: Wire, folder: Path, config: PolicyConfig) -> None:
        """folder: of the staged checkpoint."""
        self._wire, self._config = wire, config
        self._changes = folder.with_name(f"{folder.name}.changes")
        """Not inside the folder, because the server reads every weight file in it."""
        self._bytes = 0

    async def prepare(self, before: VersionFile | None, model: Path, terms: Terms, *, compared: bool) -> bool:
        """Write the elements that differ from `before`. False without a useful file."""
        self._bytes = 0
        if compared and terms.tp_size == 1 and before is not None and Path(before.path).exists():
            what = self._changes, Path(before.path), model, self._config, terms.dtype
            self._bytes = await asyncio.to_thread(write, *what)
        return bool(self._bytes)

    async def send(self, label: str, terms: Terms) -> bool:
        """Make the loader apply the changed elements. ServerError when the server is gone."""
        try:
            await self._wire.post("/begin_weight_update", {})
            try:
                asked = body(self._changes, label)
                answer = await self._wire.post("/update_weights_from_tensor", asked, UPDATE_S)
            finally:
                with suppress(ServerError):
                    await self._wire.post("/end_weight_update", {})
        except EngineError as error:
            if isinstance(error, ServerError) and error.kind == "gone":
                raise
            answer = {}
        if answer.get("success") is not True:
            self.failed("the loader refused the changed elements")
            return False
        return True

    def failed(self, reason: str) -> None:
        """The next version is sent as changed elements again: a load from the folder repairs this one."""
        self._bytes = 0

    def discard(self) -> None:
        """Delete the file."""
        self._changes.unlink(missing_ok=True)

    def stats(self) -> dict[str, float]:
        """Bytes of the changed elements that the last change sent; 0 when it loaded from disk."""
        return {"sparse_bytes": self._bytes}
