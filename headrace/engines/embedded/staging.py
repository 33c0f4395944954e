"""Staging in the embedded engine: loads a file into a model piece by piece, between two decode steps.

Idea: a second thread that builds the next model slows decoding, because both threads need the interpreter's lock for
every small operation: 1 ms of Python in the second thread lengthens a step from 1.4 ms to 4 ms. So the worker stages by
itself, in slices of a quarter of a millisecond, at most one after each step. The first read of the file waits for a
disk; a thread does it, because it needs no lock.

The model that is no longer served receives the next version. So the memory of two models stays allocated, and no memory
is allocated, faulted in or freed while requests wait.

The state hash covers the weights that are served. A tensor in the engine's own dtype is hashed in the model's memory. A
tensor that is published in fewer bits (bf16, or quantised elements with their scales) is copied and hashed, and its
exact values are written into the model. A tensor that is published in more bits than the engine computes with is
refused.

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

from headrace.engines.base import EngineError, RefusedVersion
from headrace.messages.weights import TensorInfo
from headrace.policy.config import PolicyConfig
from headrace.policy.layout import formats
from headrace.policy.numerics import Numerics
from headrace.policy.provider import build
from headrace.policy.seam import PolicyModel
from headrace.weights import state, tensor_state
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
        host: PolicyModel | None = None,
    ) -> None:
        """host: the buffer in host memory of another shell, for a model on another device; no two stagings may use it
        at once."""
        self.config = config
        self.model = build(config, numerics)
        self.host = self.model
        """The model in host memory that a staging fills: on a CPU the served one."""
        where = torch.device(device)
        if where.type != "cpu":
            _replace(self.model, lambda old: torch.empty_like(old, device=where))
            self.host = host or build(config, numerics)
            if host is None and where.type == "cuda":
                _replace(self.host, lambda old: torch.empty(old.shape, dtype=old.dtype, pin_memory=True))
        self.tensors: dict[str, Tensor] = self.host.views()
        apart = [name for name, view in self.tensors.items() if not view.is_contiguous() or view.device.type != "cpu"]
        if apart:
            raise EngineError(f"{apart[0]} is not contiguous in this machine's memory: it cannot be staged")
        self.bits: dict[str, Bits] = {name: tensor_state.bits(view) for name, view in self.tensors.items()}
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
            self.future.set_exception((RefusedVersion if isinstance(error, WeightError) else EngineError)(text))
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
        quantised = self._check(file.tensors)
        owners = {part.name: name for name, (_, parts) in quantised.items() for part in parts}
        hashes = bytearray()
        copies: list[Tensor] = []
        """Of the parts of the quantised tensor that is read; their names follow each other."""
        for info in file.tensors:
            source = file.array(info)
            if info.name in self.shell.bits and _same(info, self.shell.tensors[info.name]):
                hashes += yield from state.copied(source, self.shell.bits[info.name], PIECE_BYTES)
                continue
            copy = np.empty(source.size, source.dtype)
            hashes += yield from state.copied(source, copy, PIECE_BYTES)
            if info.name in owners:
                grid, parts = quantised[owners[info.name]]
                copies.append(
                    torch.from_numpy(copy.view(np.uint8)).view(tensor_state.DTYPES[info.dtype]).view(info.shape)
                )
                if len(copies) == len(parts):
                    yield from self._widen_blocks(owners[info.name], grid, copies)
                    copies = []
            elif info.name in self.shell.tensors:
                yield from self._widen(info, copy)
        root = state.root(file.tensors, bytes(hashes))
        if root != self._wanted:
            raise RefusedVersion(
                f"version {self.version} from {self._path} has state hash {root}, expected {self._wanted}"
            )
        yield from self.shell.upload()

    def _grid(self, info: TensorInfo) -> str:
        """The number format of a published tensor with scales, by the elements; empty without."""
        four = self.shell.config.expert_format == "nvfp4" and formats.is_expert(info.name)
        if info.name not in self.shell.tensors:
            return ""
        return "nvfp4" if four and info.dtype == "U8" else "mxfp8" if not four and info.dtype == _EIGHT_BITS else ""

    def _check(self, tensors: tuple[TensorInfo, ...]) -> dict[str, tuple[str, list[TensorInfo]]]:
        """The number format and the parts of each quantised tensor. WeightError unless these are the model's tensors,
        in shapes and dtypes that it can serve exactly."""
        wanted, received = self.shell.tensors, {info.name: info for info in tensors}
        quantised = {
            info.name: (grid, formats.described(grid, info.name, wanted[info.name].shape))
            for info in tensors
            if (grid := self._grid(info))
        }
        scales = {part.name for _, parts in quantised.values() for part in parts[1:]}
        extra = set(received) - set(wanted) - scales - ({"lm_head.weight"} if self.shell.config.tied else set())
        missing = (set(wanted) | scales) - set(received)
        if extra or missing:
            first = sorted(extra or missing)[0]
            raise WeightError(
                f"{len(missing)} tensors are missing and {len(extra)} are not of this model; the first is {first}"
            )
        for name, tensor in wanted.items():
            info = received[name]
            grid, parts = quantised.get(name, ("", []))
            shape = parts[0].shape if parts else tuple(tensor.shape)
            if info.shape != shape:
                raise WeightError(f"{name}: expected shape {list(shape)}, got {list(info.shape)}")
            if grid:
                block = formats.FORMS[grid].block
                fits = all(
                    received[part.name].shape == part.shape
                    and state.itemsize(received[part.name].dtype) == state.itemsize(part.dtype)
                    for part in parts
                )
                if not fits or tensor.shape[-1] % block:
                    raise WeightError(f"{name}: expected one scale of one byte per {block} elements")
                continue
            coarse = self.shell.config.expert_format if formats.is_expert(name) else ""
            if coarse or (not _same(info, tensor) and (info.dtype, tensor.dtype) not in _WIDER):
                kind = f"{coarse} experts" if coarse else str(tensor.dtype).removeprefix("torch.")
                raise WeightError(
                    f"{name} is published in {info.dtype}, which an engine of {kind} cannot serve as it is; "
                    "set [weights] precision or [policy] dtype"
                )
        return quantised

    def _widen(self, info: TensorInfo, copy: Bits) -> Iterator[None]:
        source = torch.from_numpy(copy.view(np.uint8)).view(tensor_state.DTYPES[info.dtype])
        target = self.shell.tensors[info.name].view(-1)
        step = PIECE_BYTES // target.itemsize
        for at in range(0, target.numel(), step):
            target[at : at + step] = source[at : at + step]
            yield

    def _widen_blocks(self, name: str, grid: str, parts: list[Tensor]) -> Iterator[None]:
        target = self.shell.tensors[name]
        if not target.numel():
            return
        target = target.view(-1, target.shape[-1])
        elements, scales = (part.view(len(target), -1) for part in parts[:2])
        step = max(1, PIECE_BYTES // 16 // target.shape[-1])
        for at in range(0, len(target), step):
            rows = slice(at, at + step)
            target[rows] = formats.widened(grid, (elements[rows], scales[rows], *parts[2:]), target.dtype)
            yield


def _same(info: TensorInfo, tensor: Tensor) -> bool:
    return tensor_state.DTYPES[info.dtype] == tensor.dtype
