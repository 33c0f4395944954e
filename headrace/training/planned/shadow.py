"""Counts the bytes of tensors that a step would hold: floating-point tensors are PyTorch's fake tensors, integers real.

Idea: the trainer's own code runs under `FakeTensorMode`, where a tensor has a shape, a dtype and a storage of a size,
and no memory; this mode adds up the storages that are alive. Integers keep their values, because the code depends on
them: routes, positions, the rows of each expert. A number that is read from a fake tensor is 1.0.

`torch.distributed._tools.MemTracker` counts in the same way. It is not used: it has no peak between two marks, which
the extrapolation over layers needs, integers are fake under it, and it does not see the allocations inside operators
of `headrace.kernels`. Those run here as Python: on the CPU the twins, on a GPU the functions that launch Triton
(`dispatch.STANDING`), whose launches do nothing. `_INSIDE` has the temporary tensors of PyTorch's own operators.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.kernels import dispatch

_DEVICE = torch.ops.prim.device.default
_BLOCK = 512
"""Bytes that CUDA's caching allocator rounds to."""


def _cut(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """`chunk_cat`, with which FSDP cuts gradients into parts, copies one after the other to cast it."""
    return max((x.nbytes for x in args[0] if x.dtype != kwargs["out"].dtype), default=0)


_INSIDE: dict[str, Callable[[tuple[Any, ...], dict[str, Any]], int]] = {"fsdp::chunk_cat": _cut}
"""Operators that hold a temporary tensor inside on the CPU, to its bytes. The kernels of a GPU read other dtypes."""


def _tensors(values: Any) -> Iterator[Tensor]:
    """The tensors among an operator's arguments or results."""
    for value in values if isinstance(values, list | tuple) else (values,):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


class Shadow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within this block tensors have no values, and `live` is the number of their bytes."""

    def __init__(self, *, gpu: bool) -> None:
        """gpu: tensors stand for a GPU's, although their device is the CPU everywhere."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.gpu = gpu
        self.live = self.peak = 0
        self.label = ""
        self.peaks: dict[str, int] = {}
        """Largest `live` by label."""
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._sizes: dict[int, int] = {}
        """Bytes of each live storage, by its address."""

    def begin(self, label: str = "") -> None:
        """From here on peaks count for this label."""
        self.label = label
        self.peaks[label] = max(self.peaks.get(label, 0), self.live)

    @contextmanager
    def running(self) -> Iterator["Shadow"]:
        """The block in which tensors are counted. Nothing else of this process may compute meanwhile."""
        resize, storage = torch.UntypedStorage.resize_, torch.UntypedStorage

        def resized(which: torch.UntypedStorage, size: int) -> Any:
            key = which._cdata
            out = resize(which, size)
            if key in self._sizes:  # FSDP frees gathered weights in this way
                self._change(key, self._rounded(size))
            return out

        standing = dispatch.STANDING
        storage.resize_ = resized  # type: ignore[method-assign, assignment]
        standing.gpu, standing.counted = self.gpu, True
        try:
            with self._fake, self:
                yield self
        finally:
            standing.gpu = standing.counted = False
            storage.resize_ = resize  # type: ignore[method-assign]

    def _rounded(self, size: int) -> int:
        return -(-size // _BLOCK) * _BLOCK if self.gpu else size

    def _change(self, key: int, size: int) -> None:
        self.live += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self._note(self.live)

    def _note(self, live: int) -> None:
        if live > self.peaks.get(self.label, 0):
            self.peaks[self.label] = live

    def _gone(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)

    def track(self, values: Any) -> None:
        """Count the storages of tensors that are new."""
        for tensor in _tensors(values):
            if isinstance(tensor, DTensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._sizes:
                self._change(key, self._rounded(storage.nbytes()))
                weakref.finalize(storage, self._gone, key)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise every operation passes torch's compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # autograd asks before every operation
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name = func._schema.name
        if name.startswith("c10d::"):
            if not self.gpu and name == "c10d::_reduce_scatter_base_":  # gloo adds up a copy
                self._note(self.live + args[1].nbytes)
            return _collective(name, args)
        given = [*_tensors(args), *_tensors(list(kwargs.values()))]
        fake = any(isinstance(each, FakeTensor) for each in given)
        if name == "aten::_local_scalar_dense" and fake:
            return 1.0 if args[0].dtype.is_floating_point else 0
        if self.gpu and name.startswith("headrace::"):
            with self:
                return _kernel(name)(*args, **kwargs)
        out = self._real(func, args, kwargs) if not fake and _whole(given, args, kwargs) else func(*args, **kwargs)
        self.track(out)
        if not self.gpu and name in _INSIDE:
            self._note(self.live + _INSIDE[name](args, kwargs))
        return out

    def _real(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute with values. Integers that a GPU's kernel would write are 0."""
        with unset_fake_temporarily():
            out = func(*args, **kwargs)
            if "empty" in func._schema.name:
                for each in _tensors(out):
                    each.zero_()
        return out


def _whole(given: list[Tensor], args: Any, kwargs: Any) -> bool:
    """Whether an operation without fake operands makes no floating-point numbers of its own."""
    wanted = kwargs.get("dtype")
    if wanted is not None:
        return not wanted.is_floating_point
    if given:
        return True
    numbers = [value for value in args if not isinstance(value, list | tuple)]
    return bool(numbers) and all(isinstance(value, int) for value in numbers)  # arange, full and the like


def _kernel(name: str) -> Callable[..., Any]:
    """The function with which a GPU computes an operator of `headrace.kernels`."""
    from torch._library.custom_ops import OPDEFS

    function: Callable[..., Any] = OPDEFS[name]._backend_fns["cuda"]
    return function


def _collective(name: str, args: Any) -> Any:
    """A collective, without a transfer. Integers are received as if all processes had this one's, the first's."""
    from torch._C._distributed_c10d import FakeWork

    work = FakeWork().boxed()
    outs, given = list(_tensors(args[0])), list(_tensors(args[1])) if len(args) > 1 else []
    sent = given[0] if given else None
    if name in ("c10d::allgather_", "c10d::alltoall_base_") and not isinstance(sent, FakeTensor | None):
        with unset_fake_temporarily():
            part = sent.reshape(-1)
            if name == "c10d::alltoall_base_":  # what each of the others sends to the first
                splits = args[4]
                part = part[: splits[0] * len(part) // max(1, len(sent)) if splits else len(part) // args[2].size()]
            for out in outs:
                times = -(-out.numel() // max(1, len(part)))
                out.view(-1).copy_(part.repeat(times)[: out.numel()])
    return work if name in ("c10d::alltoall_base_", "c10d::barrier") else (args[0], work)
