"""The certifier: examines the tests of tasks before the curriculum issues them.

CertifyAsked names a task and the hash of its bytes. The answer is the task's Certificate, from the same examination
that the judge uses, in the environment's sandboxes. A restarted certifier reads requests and certificates from the
stream and continues with the requests that have no certificate.
"""

import asyncio
from typing import Any, ClassVar, Literal

import msgspec

from headrace.backoff import Backoff
from headrace.bus.nats.received import Received
from headrace.bus.runtime.actor import Actor
from headrace.judging import rules
from headrace.judging.certifying import certify
from headrace.messages.base import Message
from headrace.messages.judging import Certificate, CertifyAsked
from headrace.messages.sandbox import Acquire, NoCapacity, SandboxLost, SandboxRefused
from headrace.messages.subjects import EVENT
from headrace.registry import PluginError
from headrace.sandboxes.client import RemoteSandbox, Sandboxes
from headrace.tasks import UnknownSuite, open_suite
from headrace.tasks.base import both_sides
from headrace.tasks.certificates import task_hash


class _Named:
    """Acquires sandboxes as the certifier's, and records the backend of the last one."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes
        self.backend = ""

    async def acquire(self, request: Acquire) -> RemoteSandbox:
        sandbox = await self._sandboxes.acquire(msgspec.structs.replace(request, role="certifier"))
        self.backend = sandbox.backend
        return sandbox

    def give_back(self, sandbox: RemoteSandbox) -> None:
        self._sandboxes.give_back(sandbox)


class Certifier(Actor):
    """CertifyAsked in; Certificate out."""

    role: ClassVar[str] = "certifier"

    async def start(self) -> None:
        """Read the requests and certificates so far, then answer the open requests and new ones."""
        self._asked: dict[str, CertifyAsked] = {}
        self._answered: set[str] = set()
        self._news = asyncio.Event()
        self._sandboxes = Sandboxes(self.bus, self.config.environment.lease_s, self.waiting)
        self.every(self.config.environment.lease_s / 3, self._sandboxes.renew, "lease renewal")
        kinds: tuple[type[Message], ...] = (CertifyAsked, Certificate)
        filters = tuple(EVENT.where(run=self.run, actor="*", type=kind.type_name) for kind in kinds)
        await self.recover_and_follow({"HR_EVENT": filters}, self._apply, self._news)
        self.spawn(self._work(), "certifying")

    async def stop(self) -> None:
        """Release the sandboxes that are still held."""
        await self._sandboxes.close()

    def _apply(self, received: Received[Message]) -> bool:
        match received.message:
            case CertifyAsked() as asked:
                self._asked.setdefault(asked.task_hash, asked)
                return True
            case Certificate() as made:
                self._answered.add(made.task_hash)
        return False

    async def _work(self) -> None:
        waits = Backoff(1.0, 30.0)
        while True:
            asked = next((each for hash, each in self._asked.items() if hash not in self._answered), None)
            if asked is None:
                self.status = f"{len(self._answered)} tasks examined"
                await self.news(self._news)
                continue
            self.status = f"examining {asked.task.suite} {asked.task.task}"
            try:
                made = await self._examine(asked)
            except (SandboxLost, NoCapacity) as error:
                await self.event("certify_retry", f"{asked.task.task}: {error}", "warning")
                self._asked[asked.task_hash] = self._asked.pop(asked.task_hash)  # the other tasks come first
                with self.waiting():
                    await waits.sleep()
                continue
            waits.reset()
            self._answered.add(asked.task_hash)
            await self.publish_event(made, msg_id=f"{self.run}.{asked.task_hash}.certificate")

    async def _examination_event(
        self, kind: str, text: str = "", level: Literal["info", "warning", "error"] = "info", /, **data: Any
    ) -> None:
        await self.event(kind, text, level, **data)

    async def _examine(self, asked: CertifyAsked) -> Certificate:
        """The certificate of a task; its verdict is `refused` if this actor cannot open the task, or if its copy of the
        task has another hash."""
        refused = Certificate(
            task=asked.task, task_hash=asked.task_hash, judge_version=rules.VERSION, verdict="refused"
        )
        machines = _Named(self._sandboxes)
        try:
            suite = open_suite(asked.task.suite, self.config.tasks.dir)
            if task_hash(*both_sides(suite, asked.task.task)) != asked.task_hash:
                text = "the certifier's copy of this task differs; give it the same [tasks] dir as the curriculum"
                return msgspec.structs.replace(refused, reasons=(text,))
            made = await certify(suite, asked.task.task, machines, self._examination_event)
        except (UnknownSuite, PluginError) as error:
            return msgspec.structs.replace(refused, reasons=(str(error),))
        except SandboxRefused as error:
            return msgspec.structs.replace(refused, reasons=(f"the task cannot run here: {error}",))
        return msgspec.structs.replace(made, backend=machines.backend)
