"""A double that answers as a server on a GPU: checksums by the GPU's function, and headrace's loader inside."""

import base64
import importlib.util
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
from aiohttp import web

from headrace.engines.server.weights.checksums import fused
from headrace.engines.sglang import cuda_digest, sparse
from headrace.policy.config import PolicyConfig
from tests.support.sglang.double import Double


def loader() -> Callable[[Any, Any], None]:
    """headrace's loader by its path, as the server finds it: it is no part of the package."""
    name, _, function = sparse.LOADER.partition(".")
    spec = importlib.util.spec_from_file_location(name, sparse.FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    apply: Callable[[Any, Any], None] = getattr(module, function)
    return apply


class CudaDouble(Double):
    """Its weights in the server's own layout are `live`. Changed elements are written there alone, so generation goes
    on with the weights of the last load from disk."""

    def __init__(self, config: PolicyConfig, *, swapped: bool = False) -> None:
        """swapped: the experts' rows of up come before those of gate, as FlashInfer's CUTLASS runner holds them."""
        super().__init__(config)
        self.info = {"device": "cuda", "custom_weight_loader": [sparse.LOADER]}
        self.swapped = swapped
        self.spoilt = ""
        """A tensor of which one element is wrong after the next update."""
        self.checker_fails = False
        self.live: dict[str, torch.nn.Parameter] = {}
        self.more_posts = {
            "/begin_weight_update": self._done,
            "/end_weight_update": self._done,
            "/update_weights_from_tensor": self._changes,
        }

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """As of the model that the loader gets."""
        yield from self.live.items()

    async def _update(self, request: web.Request) -> web.Response:
        response = await super()._update(request)
        state = fused(self.model.state(), self.config)
        if self.swapped:
            for name in state:
                if "w13_weight" in name:
                    state[name] = torch.cat(state[name].chunk(2, 1)[::-1], 1)
        self.live = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in state.items()}
        self._spoil()
        return response

    async def _changes(self, request: web.Request) -> web.Response:
        body = await request.json()
        (payload,) = body["serialized_named_tensors"]
        loader()(self, pickle.loads(base64.b64decode(payload)))
        self._spoil()
        self.version = self.told = body["weight_version"]
        return web.json_response({"success": True, "message": "Success"})

    def _spoil(self) -> None:
        if self.spoilt:
            self.live[self.spoilt].data.view(-1)[3] += 1.0
            self.spoilt = ""

    async def _done(self, request: web.Request) -> web.Response:
        return web.json_response({"success": True, "message": "Success"})

    async def _check(self, request: web.Request) -> web.Response:
        if self.checker_fails:
            return web.json_response({"success": False, "message": "out of memory"}, status=400)
        sums = {name: cuda_digest.digest(tensor) for name, tensor in self.live.items()}
        return web.json_response({"success": True, "message": "", "ranks": [{"checksums": sums}]})
