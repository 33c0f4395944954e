"""The double's updates by tensors: the wire format of SGLang 0.5.23, with torch's own functions for shared memory.

Copied from its source: a session around the updates, one payload per rank, an unpickler that admits only some names,
and the end of the whole server when a payload cannot be unpickled.
"""

import asyncio
import base64
import io
import json
import pickle
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from aiohttp import web

if TYPE_CHECKING:
    from tests.support.sglang.double import Double

OPENAPI = Path(__file__).parent / "golden" / "openapi-0.5.23.json"
"""The parts of the real server's /openapi.json that the client reads."""
ADMITTED = {
    ("torch.multiprocessing.reductions", "rebuild_tensor"),
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
    ("torch.storage", "UntypedStorage"),
    ("torch", "Tensor"),
    ("torch", "bfloat16"),
    ("torch", "float32"),
    ("torch", "uint8"),
}
"""Of the names that SGLang's SafeUnpickler admits, those of plain tensors."""
Handler = Callable[[web.Request], Awaitable[web.Response]]


def openapi() -> dict[str, Any]:
    """A fresh copy of the description."""
    described: dict[str, Any] = json.loads(OPENAPI.read_text(encoding="utf-8"))
    return described


class SafeUnpickler(pickle.Unpickler):
    """Refuses other names, as the server's."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ADMITTED:
            raise RuntimeError(f"Blocked unsafe global ({module}.{name}) during pickle deserialization")
        return super().find_class(module, name)


def load(payload: str) -> list[tuple[str, torch.Tensor]]:
    """The named tensors of one rank's payload."""
    pairs: list[tuple[str, torch.Tensor]] = SafeUnpickler(io.BytesIO(base64.b64decode(payload))).load()
    return pairs


def posts(double: "Double") -> dict[str, Handler]:
    """The handlers of the endpoints."""

    async def begin(request: web.Request) -> web.Response:
        if double.session:
            return _refused("a weight-update session is already open; call end_weight_update() first")
        double.session = True
        return _done()

    async def end(request: web.Request) -> web.Response:
        if not double.session:
            return _refused("no weight-update session is open; call begin_weight_update() first")
        double.session = False
        return _done()

    async def update(request: web.Request) -> web.Response:
        body = await request.json()
        needed = "/begin_weight_update" in double.openapi["paths"]
        if needed and not double.session:
            return _refused("update_weights_from_tensor must run between begin_weight_update() and end_weight_update()")
        if double.fail_tensors == "refuse":
            return _refused("out of memory")
        try:
            assert double.fail_tensors != "die"
            payloads = body["serialized_named_tensors"]
            ranks = [load(payloads[rank]) for rank in range(double.info.get("tp_size", 1))]
            named = dict(ranks[-1])
        except Exception:
            double._dying = asyncio.create_task(double.die())
            await asyncio.sleep(0)  # it breaks all connections first
            raise
        names = sorted(named)
        if double.fail_tensors:
            names = names[::2]
        await double.take({name: named[name].clone() for name in names}, body.get("weight_version"))
        if double.fail_tensors == "half":
            return _refused("partially updated")
        double.told = double.version
        return _done()

    return {"/begin_weight_update": begin, "/end_weight_update": end, "/update_weights_from_tensor": update}


def _done() -> web.Response:
    return web.json_response({"success": True, "message": "Success"})


def _refused(message: str) -> web.Response:
    return web.json_response({"success": False, "message": message}, status=400)
