"""Mid-training's gradient on several processes of one machine, each with one torch thread.

The idea: two torch threads on small matrices gain a third at best, and when another process needs a core they spin
while they wait for each other: a slowdown by a factor of fifty was measured. Processes do not spin. A helper maps the
memory of the parent's parameters and adds its gradient to memory that both map, so nothing is copied; its share of a
batch, a few kilobytes, comes through a pipe. The parent adds the helpers' gradients in a fixed order.

The number of shares is part of the recipe. It makes no difference to the bits which process computes a share, so the
parent computes the share of a helper that died. A helper ends when its standard input closes, so it does not outlive
its parent.

Layout of the shared file (memfd): all parameters, then one gradient of all parameters per helper, each at a multiple of
64 bytes.
"""

import mmap
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import IO, Protocol, Self

import msgspec
import torch
from torch import Tensor

from headrace.policy.config import PolicyConfig
from headrace.policy.layout.sizes import forward_flops
from headrace.policy.numerics import Numerics
from headrace.policy.provider import build
from headrace.policy.seam import PolicyModel
from headrace.python_modules import module_command

TEXT_FLOPS = 150_000.0
"""The parent's work besides gradients for each token of a batch, in operations of a forward pass that take as long:
it makes the texts of the next batch (14 us a token) and gathers the tensors of its share."""


def first_share(policy: PolicyConfig) -> float:
    """The parent's share of a batch as a fraction of an equal share, so that its helpers end when it ends. A function
    of the policy alone, because the shares decide the order of sums."""
    return max(0.25, 1.0 - TEXT_FLOPS / forward_flops(policy, 1, 1))


class Text(Protocol):
    """A sequence with a loss weight per token; the first token is never a target, so its weight is not used."""

    @property
    def ids(self) -> Sequence[int]:
        """Token ids."""

    @property
    def weights(self) -> Sequence[float]:
        """Loss weights, one per id."""


class Share(msgspec.Struct, frozen=True, array_like=True):
    """One process's share of a batch: flat ids and weights, and the batch's whole loss weight."""

    lengths: list[int]
    ids: list[int]
    weights: list[float]
    divisor: float


class _Hello(msgspec.Struct, frozen=True):
    """The first message to a helper."""

    config: PolicyConfig
    numerics: Numerics
    fd: int
    number: int
    frozen: list[str]
    """Parameters without a gradient."""


def shares(texts: Sequence[Text], count: int, lead: float = 1.0) -> list[Share]:
    """Cut a batch into `count` shares, in order; the last shares may be empty. lead: the first share as a fraction of
    an equal one; the others are about equal."""
    divisor = sum(weight for text in texts for weight in text.weights[1:])
    total = sum(len(text.ids) for text in texts)
    first = lead / count if count > 1 else 1.0
    cuts = [first + (1.0 - first) * number / max(1, count - 1) for number in range(count)]
    out = [Share([], [], [], divisor) for _ in cuts]
    done, number = 0, 0
    for text in texts:
        while number < count - 1 and done >= cuts[number] * total:
            number += 1
        out[number].lengths.append(len(text.ids))
        out[number].ids.extend(text.ids)
        out[number].weights.extend(text.weights)
        done += len(text.ids)
    return out


def backward(model: PolicyModel, share: Share) -> float:
    """Add a share's gradient to the model. Returns its part of the batch's weighted mean negative log-likelihood, in
    nats."""
    loss = negative_logp(model, share)
    if loss is None:
        return 0.0
    torch.autograd.backward(loss)
    return float(loss.detach())


def negative_logp(model: PolicyModel, share: Share) -> Tensor | None:
    """A share's part of the batch's weighted mean negative log-likelihood, in nats; None without a target that counts.
    Where processes share the tokens, each has the loss of all of them, and the gradient of its own."""
    flat, weights = torch.tensor(share.ids), torch.tensor(share.weights)
    inside = torch.ones(len(flat), dtype=torch.bool)
    inside[torch.tensor(share.lengths, dtype=torch.int64).cumsum(0) - 1] = False  # a last token is only a target
    inputs, lengths = flat[inside], [length - 1 for length in share.lengths]
    targets, weights = flat[1:][inside[:-1]], weights[1:][inside[:-1]]
    rows = (weights > 0).nonzero().flatten()
    if not len(rows):
        return None
    processes = model.shared.size if model.shared is not None else 1
    if len(inputs) < processes:  # each needs a token
        lengths.append(processes - len(inputs))
        inputs = torch.cat((inputs, inputs.new_zeros(lengths[-1])))

    def places(cuts: Sequence[int]) -> list[int]:
        before: list[int] = torch.searchsorted(rows, torch.tensor(cuts)).tolist()
        return before

    ids, at, wanted, each = (tensor.to(model.device) for tensor in (inputs, rows, targets[rows], weights[rows]))
    logp, _ = model.sampled_logprobs(ids, lengths, None, at, wanted, 1.0, places)
    return -(each * logp).sum() / share.divisor


def _views(model: PolicyModel, memory: mmap.mmap, offset: int) -> list[Tensor]:
    """Tensors like the model's parameters, one after another in shared memory."""
    out = []
    for parameter in model.parameters():
        flat = torch.frombuffer(memory, dtype=parameter.dtype, count=parameter.numel(), offset=offset)
        out.append(flat.view(parameter.shape))
        offset += -(-parameter.nbytes // 64) * 64
    return out


def _size(model: PolicyModel) -> int:
    return sum(-(-parameter.nbytes // 64) * 64 for parameter in model.parameters())


class _Helper:
    """One child process and the memory of its gradient."""

    def __init__(self, model: PolicyModel, fd: int, memory: mmap.mmap, number: int) -> None:
        self.gradients = _views(model, memory, _size(model) * number)
        self._process = subprocess.Popen(
            module_command("headrace.training.parallel.mid_training.shards"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[fd],
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        self.alive = self.send(msgspec.msgpack.encode(_Hello(model.config, model.numerics, fd, number, frozen)))

    def send(self, frame: bytes) -> bool:
        """Write a frame to the helper. False when the helper has ended."""
        assert self._process.stdin is not None
        try:
            _write(self._process.stdin, frame)
        except OSError:
            return False
        return True

    def loss(self) -> float | None:
        """The helper's loss for its share; None when the helper has ended."""
        assert self._process.stdout is not None
        frame = _read(self._process.stdout)
        return None if frame is None else float(msgspec.msgpack.decode(frame, type=float))

    def close(self) -> None:
        """End the helper; kill it after 5 s."""
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                assert pipe is not None
                pipe.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Shards:
    """`with Shards(model, 2) as shards: loss = shards.backward(texts)` adds the batch's gradient to the model's."""

    def __init__(self, model: PolicyModel, processes: int) -> None:
        """processes: number of processes including this one; 1 starts no helper."""
        self._model = model
        self._processes = processes
        self._helpers: list[_Helper] = []
        self.lost = 0
        """Number of helpers that died; this process computes their shares."""

    def __enter__(self) -> Self:
        if self._processes > 1:
            size = _size(self._model)
            fd = os.memfd_create("headrace-shards")
            try:
                os.ftruncate(fd, size * self._processes)
                memory = mmap.mmap(fd, size * self._processes)
                for parameter, view in zip(self._model.parameters(), _views(self._model, memory, 0), strict=True):
                    parameter.data = view.copy_(parameter.data)
                self._helpers = [_Helper(self._model, fd, memory, n) for n in range(1, self._processes)]
            finally:
                os.close(fd)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for helper in self._helpers:
            helper.close()
        if self._helpers:
            for parameter in self._model.parameters():
                parameter.data = parameter.data.clone()  # the shared memory is freed with its last view
        self._helpers = []

    def backward(self, texts: Sequence[Text], meanwhile: Callable[[], None] = lambda: None) -> float:
        """Add the batch's gradient to the model's; returns its weighted mean loss, in nats. `meanwhile` runs while
        helpers compute."""
        parts = shares(texts, self._processes, first_share(self._model.config))
        for helper, part in zip(self._helpers, parts[1:], strict=True):
            if helper.alive and not helper.send(msgspec.msgpack.encode(part)):
                self._lose(helper)
        loss = backward(self._model, parts[0])
        meanwhile()
        for helper, part in zip(self._helpers, parts[1:], strict=True):
            answer = helper.loss() if helper.alive else None
            if answer is None and helper.alive:
                self._lose(helper)
            loss += self._alone(helper, part) if answer is None else answer
            for parameter, gradient in zip(self._model.parameters(), helper.gradients, strict=True):
                if not parameter.requires_grad:
                    continue
                if parameter.grad is None:
                    parameter.grad = gradient.clone()
                else:
                    parameter.grad.add_(gradient)
        return loss

    def _lose(self, helper: _Helper) -> None:
        helper.alive = False
        self.lost += 1

    def _alone(self, helper: _Helper, part: Share) -> float:
        """Compute a dead helper's share here and write the gradient into the helper's memory, as the helper would
        have."""
        parent_gradients = [parameter.grad for parameter in self._model.parameters()]
        self._model.zero_grad(set_to_none=True)
        loss = backward(self._model, part)
        for parameter, gradient, before in zip(
            self._model.parameters(), helper.gradients, parent_gradients, strict=True
        ):
            gradient.zero_() if parameter.grad is None else gradient.copy_(parameter.grad)
            parameter.grad = before
        return loss


def _write(pipe: IO[bytes], frame: bytes) -> None:
    pipe.write(struct.pack("<I", len(frame)) + frame)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes | None:
    """One frame; None at the end of the pipe."""
    head = pipe.read(4)
    if len(head) < 4:
        return None
    (size,) = struct.unpack("<I", head)
    frame = pipe.read(size)
    return frame if len(frame) == size else None


def serve(inbox: IO[bytes], outbox: IO[bytes]) -> None:
    """The loop of a helper: compute shares until `inbox` closes. Parameters and gradients are in shared memory."""
    torch.set_num_threads(1)
    first = _read(inbox)
    if first is None:
        return
    hello = msgspec.msgpack.decode(first, type=_Hello)
    model = build(hello.config, hello.numerics)
    memory = mmap.mmap(hello.fd, 0)
    for parameter, view in zip(model.parameters(), _views(model, memory, 0), strict=True):
        parameter.data = view
    for name in hello.frozen:
        model.get_parameter(name).requires_grad_(False)
    gradients = _views(model, memory, _size(model) * hello.number)
    while (frame := _read(inbox)) is not None:
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient.zero_() if parameter.requires_grad else None
        loss = backward(model, msgspec.msgpack.decode(frame, type=Share))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            if parameter.grad is not None and parameter.grad.data_ptr() != gradient.data_ptr():
                gradient.copy_(parameter.grad)
        _write(outbox, msgspec.msgpack.encode(loss))


if __name__ == "__main__":
    with suppress(BrokenPipeError, KeyboardInterrupt):
        serve(sys.stdin.buffer, sys.stdout.buffer)
