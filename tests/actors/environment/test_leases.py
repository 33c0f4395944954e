"""A node's own delay ends no lease."""

import time
from types import SimpleNamespace
from typing import Any, cast

from headrace.actors.environment.leases import Lease, Leases
from headrace.messages.sandbox import Acquire


def test_a_node_that_stood_still_ends_no_lease_before_it_has_read_the_renewals() -> None:
    """An earlier reaper ran before the renewals that had arrived meanwhile, so the attempt lost its sandbox."""
    request = Acquire(
        run="r", lane="train", role="rollout", group="g", slot=0, attempt=0, isolation="episode", lease_s=20.0
    )
    lease = Lease(request, cast(Any, SimpleNamespace(id="s1")))
    leases = Leases()
    leases.add(lease)
    lease.renew()
    now = time.monotonic()
    assert leases.lapsed(now, 1.0) == []
    assert leases.lapsed(now + 30.0, 1.0) == []
    assert leases.lapsed(now + 31.0, 1.0) == []
    lease.renew()
    assert [leases.lapsed(now + second, 1.0) for second in range(32, 52)][-1] == [lease]
