"""The leases of a node's sandboxes: each has an owner, identified by secret and epoch, and a time at which it lapses.

Acquiring a key that is in use gives the same sandbox to the new caller under a new secret and epoch, and calls under
the old ones are refused from then on. A second rollout actor can therefore continue an attempt of one that was killed,
and the two never act in the same sandbox. Both are of one role: a sandbox never changes its role (`SandboxKey.role`).
"""

import hmac
import secrets
import time

from headrace.errors import HeadraceError
from headrace.messages.sandbox import Acquire, SandboxKey
from headrace.vmhost.node.host import VmSandbox


class OwnershipRefused(HeadraceError):
    """The secret or the epoch is not the current owner's."""


class Unknown(HeadraceError, code="lost"):
    """This node has no such sandbox: it was released, its lease lapsed, or its machine ended."""


class Lease:
    """The lease of one sandbox."""

    def __init__(self, request: Acquire, sandbox: VmSandbox) -> None:
        self.request = request
        self.key = SandboxKey.of(request)
        self.sandbox = sandbox
        self.secret = ""
        self.epoch = 0
        self.handovers = request.handovers
        self.lease_s = request.lease_s
        self.expires = 0.0
        self.running = 0
        """Number of running calls; the lease does not lapse while there are any."""

    def hand_over(self, lease_s: float) -> None:
        """Give the sandbox to a new owner: a new secret, the next epoch."""
        self.secret = secrets.token_hex(16)
        self.epoch += 1
        self.renew(lease_s)

    def renew(self, lease_s: float = 0.0) -> None:
        """Restart the lease now. lease_s: its new length in seconds; 0 keeps its length."""
        self.lease_s = lease_s or self.lease_s
        self.expires = time.monotonic() + self.lease_s

    def check(self, caller: str, secret: str, epoch: int) -> None:
        """Raise OwnershipRefused unless the caller's role, the secret and the epoch are the current owner's."""
        if caller != self.key.role:
            raise OwnershipRefused(f"the role {caller} did not acquire this sandbox")
        if epoch != self.epoch or not hmac.compare_digest(secret, self.secret):
            raise OwnershipRefused(f"epoch {epoch} is not the current owner's")


class Leases:
    """All leases of this node, by key and by sandbox id."""

    def __init__(self) -> None:
        self._looked = 0.0
        self._by_key: dict[SandboxKey, Lease] = {}
        self._by_id: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, key: SandboxKey) -> Lease | None:
        """The lease of a key; None without one."""
        return self._by_key.get(key)

    def add(self, lease: Lease) -> None:
        """Register a sandbox that was just opened."""
        self._by_key[lease.key] = lease
        self._by_id[lease.sandbox.id] = lease

    def drop(self, lease: Lease) -> bool:
        """Remove a lease; False when it was removed before."""
        if self._by_id.pop(lease.sandbox.id, None) is None:
            return False
        if self._by_key.get(lease.key) is lease:
            del self._by_key[lease.key]
        return True

    def authorise(self, caller: str, sandbox: str, secret: str, epoch: int) -> Lease:
        """The lease of a call, after checking its caller, secret and epoch. Unknown, OwnershipRefused."""
        lease = self._by_id.get(sandbox)
        if lease is None:
            raise Unknown(f"this node has no sandbox {sandbox}")
        lease.check(caller, secret, epoch)
        return lease

    def lapsed(self, now: float, every_s: float) -> list[Lease]:
        """Leases that were not renewed in time and have no running call.

        now: `time.monotonic`. every_s: seconds between two calls. A node that was stopped or starved between them has
        read no renewals, so its leases run longer by the time that it lost.
        """
        lost_s = now - self._looked - every_s if self._looked else 0.0
        self._looked = now
        if lost_s > every_s:
            for lease in self._by_id.values():
                lease.expires += lost_s
        return [lease for lease in self._by_id.values() if not lease.running and lease.expires <= now]
