"""Staging in the embedded engine: loads a file into a model piece by piece, between two decode steps.

Idea: a second thread that builds the next model slows decoding, because both threads need the interpreter's lock for
every small operation: 1 ms of Python in the second thread lengthens a step from 1.4 ms to 4 ms. So the worker stages by
itself, in slices of a quarter of a millisecond, at most one after each step. The first read of the file waits for a
disk; a thread does it, because it needs no lock.

The model that is no longer served receives the next version. So the memory of two models stays allocated, and no memory
is allocated, faulted in or freed while requests wait.

The state hash covers the weights that are served. A tensor in the engine's own dtype is hashed in the model's memory. A
tensor that is published in fewer bits (bf16, or MXFP8 elements with their scales) is copied and hashed, and its exact
values are written into the model. A tensor that is published in more bits than the engine computes with is refused.

On a GPU the file is copied and hashed in the host's memory, in one buffer for all versions. The verified bytes are then
copied to the device, also in slices between two steps, into a model that is not served yet.

Trade-off: copying and hashing delay decoding, also when another core is idle.
"""

import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future

import numpy as np
import torch
from torch import Tensor, nn

from headrace.engines.base import EngineError
from headrace.kernels import mxfp8
from headrace.messages.weights import TensorInfo
from headrace.policy.config import PolicyConfig
from headrace.policy.layout import formats, names
from headrace.policy.model import Model
from headrace.policy.numerics import Numerics
from headrace.weights import state
from headrace.weights.publishing.precision import SCALE
from headrace.weights.snapshot import Snapshot
from headrace.weights.state import Bits, WeightError

SLICE_S = 2.5e-4
"""Smallest number of seconds of staging between two steps; the last piece may exceed it."""
SHARE = 0.1
"""Staging after a long step, as a share of the step's time."""
PIECE_BYTES = 1 << 18
"""Bytes that are copied and hashed at a time, in about 40 microseconds."""
UPLOAD_BYTES = 1 << 22
"""Bytes that are copied to a GPU at a time, in about 0.2 milliseconds."""
_READ_BYTES = 1 << 20
_WIDER = {("BF16", torch.float32), ("F16", torch.float32)}
"""(published dtype, computed dtype) of exact conversions."""
_EIGHT_BITS = "F8_E4M3"


class Shell:
    """A model whose weights are not set yet, and its tensors under their published names. It receives one version after
    another."""

    def __init__(
        self,
        config: PolicyConfig,
        numerics: Numerics,
        device: torch.device | str = "cpu",
        host: Model | None = None,
    ) -> None:
        """host: the buffer in host memory of another shell, for a model on another device; no two stagings may use it
        at once."""
        self.config = config
        self.model = Model(config, numerics, seed=None)
        self.host = self.model
        """The model in host memory that a staging fills: on a CPU the served one."""
        where = torch.device(device)
        if where.type != "cpu":
            _replace(self.model, lambda old: torch.empty_like(old, device=where))
            self.host = host or Model(config, numerics, seed=None)
            if host is None and where.type == "cuda":
                _replace(self.host, lambda old: torch.empty(old.shape, dtype=old.dtype, pin_memory=True))
        parameters = {name: parameter.data for name, parameter in self.host.named_parameters()}
        self.tensors: dict[str, Tensor] = names.views(config, parameters)
        apart = [name for name, view in self.tensors.items() if not view.is_contiguous() or view.device.type != "cpu"]
        if apart:
            raise EngineError(f"{apart[0]} is not contiguous in this machine's memory: it cannot be staged")
        self.bits: dict[str, Bits] = {name: state.bits(view) for name, view in self.tensors.items()}
        """The bit views of the same memory."""

    def upload(self) -> Iterator[None]:
        """Copy the weights from host memory to the model's device, piece by piece; nothing on a CPU."""
        if self.host is self.model:
            return
        for source, target in zip(self.host.parameters(), self.model.parameters(), strict=True):
            host, there = source.data.view(-1), target.data.view(-1)
            step = UPLOAD_BYTES // host.itemsize
            for at in range(0, host.numel(), step):
                there[at : at + step].copy_(host[at : at + step])
                yield


def _replace(model: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    """New parameters in place of a model's, unset."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(make(parameter.data), requires_grad=parameter.requires_grad))


class LoadedWeights:
    """One verified set of weights."""

    def __init__(self, version: int, state_hash: str, shell: Shell) -> None:
        self.version, self.state_hash, self.shell, self.model = version, state_hash, shell, shell.model
        self.key = f"{version}:{state_hash}".encode()


def read_ahead(path: str) -> None:
    """Read the file into the page cache, so that no step waits for a disk; the interpreter's lock is free meanwhile.
    Errors are ignored here, because staging reads the file again and reports them.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            buffer = bytearray(_READ_BYTES)
            while file.readinto(buffer):
                continue
    except OSError:
        return


class Staging:
    """Fills a shell with one version. `future` gets the weights, or EngineError."""

    def __init__(self, shell: Shell, version: int, path: str, state_hash: str) -> None:
        self.shell, self.version = shell, version
        self.future: Future[LoadedWeights] = Future()
        self.future.set_running_or_notify_cancel()
        self._path, self._wanted = path, state_hash
        self._pieces = self._fill()

    def advance(self, until: float) -> bool:
        """Continue until a time on the clock `time.perf_counter`. True when staging has ended."""
        try:
            for _ in self._pieces:
                if time.perf_counter() >= until:
                    return False
        except EngineError as error:
            self.future.set_exception(error)
        except (OSError, WeightError) as error:
            text = f"version {self.version} cannot be loaded from {self._path}: {error}"
            self.future.set_exception(EngineError(text))
        except Exception as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(LoadedWeights(self.version, self._wanted, self.shell))
        return True

    def fail(self, error: EngineError) -> None:
        """End with an error."""
        self._pieces.close()
        self.future.set_exception(error)

    def _fill(self) -> Generator[None, None, None]:
        file = Snapshot(self._path)
        yield
        self._check(file.tensors)
        expected = {info.name: info for info in file.tensors}
        hashes = bytearray()
        copies: dict[str, Bits] = {}
        """Copies of tensors that must be converted before they are served; each is dropped after its conversion."""
        for info in file.tensors:
            source = file.array(info)
            if info.name in self.shell.bits and _same(info, self.shell.tensors[info.name]):
                hashes += yield from state.copied(source, self.shell.bits[info.name], PIECE_BYTES)
                continue
            copy = np.empty(source.size, source.dtype)
            hashes += yield from state.copied(source, copy, PIECE_BYTES)
            name = info.name.removesuffix(SCALE)
            if info.dtype == _EIGHT_BITS:
                copies[info.name] = copy  # its scales are the next name
            elif name in copies:
                yield from self._widen_blocks(expected[name], copies.pop(name), copy)
            elif info.name in self.shell.tensors:
                yield from self._widen(info, copy)
        root = state.root(file.tensors, bytes(hashes))
        if root != self._wanted:
            raise EngineError(
                f"version {self.version} from {self._path} has state hash {root}, expected {self._wanted}"
            )
        yield from self.shell.upload()

    def _check(self, tensors: tuple[TensorInfo, ...]) -> None:
        """WeightError unless these are the model's tensors, in shapes and dtypes that it can serve exactly."""
        wanted, received = self.shell.tensors, {info.name: info for info in tensors}
        scales = {info.name + SCALE for info in tensors if info.dtype == _EIGHT_BITS}
        extra = set(received) - set(wanted) - scales - ({"lm_head.weight"} if self.shell.config.tied else set())
        missing = (set(wanted) | scales) - set(received)
        if extra or missing:
            first = sorted(extra or missing)[0]
            raise WeightError(
                f"{len(missing)} tensors are missing and {len(extra)} are not of this model; the first is {first}"
            )
        for name, tensor in wanted.items():
            info = received[name]
            if info.shape != tuple(tensor.shape):
                raise WeightError(f"{name}: expected shape {list(tensor.shape)}, got {list(info.shape)}")
            if info.dtype == _EIGHT_BITS:
                scale = received[name + SCALE]
                blocks = (*info.shape[:-1], info.shape[-1] // mxfp8.BLOCK)
                if scale.shape != blocks or state.itemsize(scale.dtype) != 1 or info.shape[-1] % mxfp8.BLOCK:
                    raise WeightError(f"{name}: expected one scale of one byte per {mxfp8.BLOCK} elements")
                continue
            coarse = self.shell.config.expert_format if formats.is_expert(name) else ""
            if coarse or (not _same(info, tensor) and (info.dtype, tensor.dtype) not in _WIDER):
                kind = f"{coarse} experts" if coarse else str(tensor.dtype).removeprefix("torch.")
                raise WeightError(
                    f"{name} is published in {info.dtype}, which an engine of {kind} cannot serve as it is; "
                    "set [weights] precision or [policy] dtype"
                )

    def _widen(self, info: TensorInfo, copy: Bits) -> Iterator[None]:
        source = torch.from_numpy(copy.view(np.uint8)).view(state.DTYPES[info.dtype])
        target = self.shell.tensors[info.name].view(-1)
        step = PIECE_BYTES // target.itemsize
        for at in range(0, target.numel(), step):
            target[at : at + step] = source[at : at + step]
            yield

    def _widen_blocks(self, info: TensorInfo, elements: Bits, scales: Bits) -> Iterator[None]:
        if not elements.size:
            return
        width = info.shape[-1]
        target = self.shell.tensors[info.name].view(-1, width)
        source = torch.from_numpy(elements).view(torch.float8_e4m3fn).view(-1, width)
        scale = torch.from_numpy(scales).view(-1, width // mxfp8.BLOCK)
        step = max(1, PIECE_BYTES // 16 // width)
        for at in range(0, len(target), step):
            part = slice(at, at + step)
            target[part] = mxfp8.dequantise(source[part], scale[part], target.dtype)
            yield


def _same(info: TensorInfo, tensor: Tensor) -> bool:
    return state.DTYPES[info.dtype] == tensor.dtype
