"""Who holds which sandbox of this node: secrets, epochs, and the moment at which a lease lapses.

A sandbox is named by (run, lane, role, group, slot, attempt). Asking for it again hands the same one to the new
asker under a new secret and epoch; whoever held the old pair is refused from then on. That is what lets a second
rollout actor go on where a first one died without the two ever acting in the same sandbox.
"""

import hmac
import secrets
import time
from typing import NamedTuple

from headrace.messages.sandbox import Acquire
from headrace.vmhost.host import VmSandbox


class Key(NamedTuple):
    """What makes an acquire idempotent."""

    run: str
    lane: str
    role: str
    group: str
    slot: int
    attempt: int

    @classmethod
    def of(cls, request: Acquire) -> "Key":
        """The name of the sandbox that a request asks for."""
        return cls(request.run, request.lane, request.role, request.group, request.slot, request.attempt)


class Refused(Exception):
    """The secret or the epoch is not the current holder's."""


class Unknown(Exception):
    """No such sandbox on this node: it was released, it lapsed, or its VM died."""


class Lease:
    """One sandbox in use."""

    def __init__(self, request: Acquire, sandbox: VmSandbox) -> None:
        self.request = request
        self.key = Key.of(request)
        self.sandbox = sandbox
        self.secret = ""
        self.epoch = 0
        self.handovers = request.handovers
        self.lease_s = request.lease_s
        self.expires = 0.0
        self.running = 0
        """Calls under way: a lease does not lapse while its sandbox works."""

    def hand_over(self, lease_s: float) -> None:
        """A new holder: new secret, next epoch."""
        self.secret = secrets.token_hex(16)
        self.epoch += 1
        self.keep(lease_s)

    def keep(self, lease_s: float = 0.0) -> None:
        """Count the lease from now."""
        self.lease_s = lease_s or self.lease_s
        self.expires = time.monotonic() + self.lease_s

    def check(self, secret: str, epoch: int) -> None:
        """Refused unless this is the current holder."""
        if epoch != self.epoch or not hmac.compare_digest(secret, self.secret):
            raise Refused(f"epoch {epoch} is not the holder's")


class Leases:
    """All sandboxes in use on this node, by key and by id."""

    def __init__(self) -> None:
        self._by_key: dict[Key, Lease] = {}
        self._by_id: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, key: Key) -> Lease | None:
        """The lease of a key, if it is held."""
        return self._by_key.get(key)

    def add(self, lease: Lease) -> None:
        """A sandbox that was just opened."""
        self._by_key[lease.key] = lease
        self._by_id[lease.sandbox.id] = lease

    def drop(self, lease: Lease) -> bool:
        """Forget a lease; False when it was gone already."""
        if self._by_id.pop(lease.sandbox.id, None) is None:
            return False
        if self._by_key.get(lease.key) is lease:
            del self._by_key[lease.key]
        return True

    def authorise(self, sandbox: str, secret: str, epoch: int) -> Lease:
        """The lease that a call speaks for. Unknown or Refused."""
        lease = self._by_id.get(sandbox)
        if lease is None:
            raise Unknown(f"no sandbox {sandbox} here")
        lease.check(secret, epoch)
        return lease

    def lapsed(self, now: float) -> list[Lease]:
        """Leases that nobody kept alive."""
        return [lease for lease in self._by_id.values() if not lease.running and lease.expires <= now]
