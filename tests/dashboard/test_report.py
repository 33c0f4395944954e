"""Figures of the report that are computed from observed events."""

from typing import cast

import pytest

from headrace.bus.connection import Bus
from headrace.config import Config, MidTraining
from headrace.dashboard.report import machines_cpu_s, percentile, planted, reclaim_times
from headrace.dashboard.watch import Watch
from headrace.messages.operations import Event

pytestmark = pytest.mark.anyio


def said(actor: str, id: str, kind: str, **data: str) -> Event:
    return Event(actor=actor, id=id, kind=kind, data=dict(data))


async def test_a_reclaim_lasts_until_the_last_training_request_is_back() -> None:
    watch = Watch(cast(Bus, None), "r1", Config(), started=0.0)
    watch.events = [
        (1.0, said("scavenger", "s-1", "lent", rollout="product")),
        (2.0, said("scavenger", "s-1", "reclaimed", rollout="product")),
        (2.1, said("rollout", "product", "handed_back", lane="train")),
        (2.4, said("rollout", "product", "handed_back", lane="train")),
        (2.5, said("rollout", "another", "handed_back", lane="train")),
        (9.0, said("rollout", "product", "handed_back", lane="production")),
        (10.0, said("scavenger", "s-1", "lent", rollout="product")),
        (11.0, said("rollout", "product", "handed_back", lane="train")),
        (12.0, said("scavenger", "s-1", "reclaimed", rollout="product")),
    ]
    assert reclaim_times(watch) == [pytest.approx(0.4), 0.0]


def test_a_percentile_is_one_of_the_values() -> None:
    assert percentile([], 0.5) is None
    assert [percentile([3.0, 1.0, 2.0], share) for share in (0.0, 0.5, 0.99)] == [1.0, 2.0, 3.0]


def test_the_processor_time_of_machines_adds_up_over_lanes_roles_and_the_rest() -> None:
    watch = Watch(cast(Bus, None), "r1", Config(), started=0.0)
    assert machines_cpu_s(watch) == {}, "the process backend does not measure it"
    watch.metrics = {
        "environment:e1": {"vm_cpu_ms": 6000.0, "vm_cpu_train_rollout_ms": 3000.0, "vm_cpu_train_judge_ms": 1000.0},
        "environment:e2": {"vm_cpu_ms": 2000.0, "vm_cpu_train_rollout_ms": 1500.0},
    }
    spent = machines_cpu_s(watch)
    assert {name: seconds for name, seconds in spent.items() if seconds} == {
        "train rollout": 4.5,
        "train judge": 1.0,
        "other": 2.5,
    }


def test_a_run_whose_traces_have_no_fault_says_nothing_about_faults() -> None:
    assert planted(MidTraining(quality=0.7)).startswith("30 % of the mid-training traces contain a fault: the agent")
    assert planted(MidTraining(quality=1.0)) == "" == planted(MidTraining(tokens=0, quality=0.7))
