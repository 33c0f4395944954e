"""Every number of every message has a range, so that no timer, allocation or loop gets an absurd one."""

import importlib
import inspect
import math
import pkgutil
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect as types

import headrace.messages
from headrace.config import nodes
from headrace.messages.base import Array
from headrace.messages.operations import BlobRef
from headrace.messages.rollout import PolicyRef, Workspace
from headrace.messages.sandbox import Exec, Renew, RunTests, SandboxCall
from headrace.messages.subjects import EVENT
from headrace.messages.tasks import LEAST_MEMORY_MIB, SandboxLimits, TestPlan

FIGURES = {
    *(
        f"{struct}.{name}"
        for struct in ("StepDone", "StepFigures")
        for name in ("loss grad_norm reward_mean turn_reward_mean pass_rate k1 k3 max_abs_dlp entropy clipped".split())
    ),
    "StepDone.metrics",
    "StepFigures.metrics",
    *(f"EngineMismatch.{name}" for name in "k1 k3 max_abs_dlp differ flips".split()),
    "Event.data",
    "Metric.values",
    "StepManifest.objective",
    "StepManifest.ordered",
    "TrainerOrder.settings",
    "RendererBundle.template_kwargs",
    "RendererBundle.generation",
}
"""Numbers without a range. A step's figures may legitimately be NaN or infinite, and its record must still be read;
the other numbers have no meaning of their own here. Nothing computes a time, a size or a count from them."""


def structs() -> list[type[msgspec.Struct]]:
    names = (
        module_info.name for module_info in pkgutil.walk_packages(headrace.messages.__path__, "headrace.messages.")
    )
    return sorted(
        {
            value
            for module in map(importlib.import_module, names)
            for value in vars(module).values()
            if inspect.isclass(value) and issubclass(value, msgspec.Struct)
        },
        key=lambda cls: (cls.__module__, cls.__name__),
    )


def numbers(type: Any) -> Iterator[types.IntType | types.FloatType]:
    """The numeric types within a type, those of other structs left out."""
    if isinstance(type, types.IntType | types.FloatType):
        yield type
    inner = [getattr(type, name, None) for name in ("item_type", "key_type", "value_type", "type")]
    for one in [*inner, *getattr(type, "item_types", ()), *getattr(type, "types", ())]:
        if isinstance(one, types.Type):
            yield from numbers(one)


def unbounded(number: types.IntType | types.FloatType) -> bool:
    return (number.ge is None and number.gt is None) or (number.le is None and number.lt is None)


def test_every_number_has_a_range() -> None:
    without = {
        f"{cls.__name__}.{field.name}"
        for cls in structs()
        for field in types.type_info(cls).fields  # type: ignore[attr-defined]
        if any(map(unbounded, numbers(field.type)))
    }
    # TestPlan checks its limit wherever it is made.
    assert without - {"TestPlan.timeout_s"} == FIGURES


def wire(message: Any, **fields: Any) -> bytes:
    return msgspec.msgpack.encode(msgspec.to_builtins(message) | fields)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 1e10, 2.0**70])
def test_a_timer_gets_no_absurd_number(value: float) -> None:
    call = SandboxCall(sandbox="s", secret="x", epoch=1, call_id="c", op=Exec(argv=("true",)))
    op = {"type": "exec", "argv": ["true"], "timeout_s": value}
    for cls, payload in [
        (Renew, wire(Renew(sandbox="s", secret="x", epoch=1), lease_s=value)),
        (SandboxCall, wire(call, op=op)),
        (RunTests, msgspec.msgpack.encode({"type": "run_tests", "plan": {"timeout_s": value}})),
    ]:
        with pytest.raises(msgspec.ValidationError, match=r"^Expected `float`|^timeout_s of tests: expected seconds"):
            msgspec.msgpack.decode(payload, type=cls)


@pytest.mark.parametrize("value", [0.0, 86_400.5, math.nan, math.inf, -1.0])
def test_a_plan_made_in_code_has_a_limit_that_ends(value: float) -> None:
    with pytest.raises(ValueError, match=r"^timeout_s of tests: expected seconds above 0 and at most 86400, got "):
        TestPlan(timeout_s=value)


@pytest.mark.parametrize("value", [1, 63])
def test_a_sandbox_too_small_to_start_is_refused(value: int) -> None:
    assert nodes.LEAST_MEMORY_MIB == LEAST_MEMORY_MIB
    with pytest.raises(ValueError, match="memory_mib of a sandbox: expected 0, for the node's own, or at least 64"):
        SandboxLimits(memory_mib=value)
    with pytest.raises(msgspec.ValidationError, match="at least 64, got"):
        msgspec.convert({"memory_mib": value}, SandboxLimits)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("<i4", (-1, -1)), ("<i0", (2**53,)), ("<i4", (1,) * 9), ("xx", (4,)), ("<i4", (2**60, 0))],
)
def test_an_array_has_sides_and_a_dtype(dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"dtype": dtype, "shape": shape, "data": b"1234"}), type=Array)


@pytest.mark.parametrize(("cls", "field"), [(BlobRef, "sha256"), (Workspace, "name")])
def test_a_name_of_a_subject_ends_where_it_seems_to(cls: type[msgspec.Struct], field: str) -> None:
    """A line feed at its end would end a line of the broker's protocol, too."""
    good = {"sha256": "0" * 64, "bytes": 1, "chunks": 1, "type": "t", "name": "a.b"}
    made = {name: good[name] for name in cls.__struct_fields__ if name in good}
    msgspec.convert(made, cls)
    with pytest.raises(msgspec.ValidationError, match="regex"):
        msgspec.convert(made | {field: f"{made[field]}\n"}, cls)


def test_a_run_that_a_policy_names_is_one_token() -> None:
    for run in ("", "r1", "a_b-c"):
        assert msgspec.convert({"kind": "pinned", "run": run}, PolicyRef).run == run
    for run in ("*", ">", "a.b", "../x", "r1\n", "R", "a b"):
        with pytest.raises(msgspec.ValidationError, match="regex"):
            msgspec.convert({"kind": "pinned", "run": run}, PolicyRef)
    with pytest.raises(ValueError, match="not a legal subject"):
        EVENT.at(run="r1\n", actor="a", type="t")
