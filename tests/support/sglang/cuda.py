"""A double that answers as a server on a GPU: checksums by the GPU's function."""

import torch
from aiohttp import web

from headrace.engines.server.weights.checksums import fused
from headrace.engines.sglang import cuda_digest
from headrace.policy.config import PolicyConfig
from tests.support.sglang.double import Double


class CudaDouble(Double):
    """Its weights in the server's own layout are `live`."""

    def __init__(self, config: PolicyConfig, *, swapped: bool = False) -> None:
        """swapped: the experts' rows of up come before those of gate, as FlashInfer's CUTLASS runner holds them."""
        super().__init__(config)
        self.info = {"device": "cuda"}
        self.swapped = swapped
        self.spoilt = ""
        """A tensor of which one element is wrong after the next update."""
        self.checker_fails = False
        self.live: dict[str, torch.nn.Parameter] = {}

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

    def _spoil(self) -> None:
        if self.spoilt:
            self.live[self.spoilt].data.view(-1)[3] += 1.0
            self.spoilt = ""

    async def _check(self, request: web.Request) -> web.Response:
        if self.checker_fails:
            return web.json_response({"success": False, "message": "out of memory"}, status=400)
        sums = {name: cuda_digest.digest(tensor) for name, tensor in self.live.items()}
        return web.json_response({"success": True, "message": "", "ranks": [{"checksums": sums}]})
