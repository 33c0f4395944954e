"""Every wait has a deadline where it is made, or is listed here with the reason why it ends or may last.

The scan finds awaits of futures, tasks, events, queues and locks by their syntax: a bare name, `x.wait()`, `x.get()`,
`x.join()`, `x.acquire()`, `x.receive()` without arguments, `x.wait_for(condition)`, `asyncio.shield(x)`, and
`asyncio.wait` without a timeout.
A wait inside `asyncio.timeout` has a deadline. Calls of coroutines are not found: their waits are scanned where they
are written. `asyncio.gather` is left out for the same reason.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.support.paths import ROOT

METHODS = frozenset({"wait", "get", "join", "acquire", "receive"})
DEADLINES = frozenset({"timeout", "timeout_at", "fail_after", "move_on_after"})


LOOPS = "the loop of an actor or a command: without work it waits, and stopping cancels it"
STEP = "a part of the same step: its writes and computations have deadlines, and a failed step cancels the wait"
OWN = "a task of this object, whose own waits are scanned"
CANCELLED = "the end of a task that was just cancelled or told to end, and that holds no wait without a reason here"
GONE = "a process that got SIGKILL, or a channel that was closed: the kernel reports the end"
CLIENT = "a turn that a client asked for: it ends at [production] turn_s, and with the client's connection"
INSIDE = "the turns inside, each of which ends at [engine] deadline_s, or the HTTP calls of a change of weights"
START = "the start of a sandbox or machine; each of its steps has a deadline"
REVIEWED: dict[str, str] = {
    "actors/environment/actor.py: Environment._write_lines": LOOPS,
    "actors/feedback/actor.py: Feedback._act.until_refused": LOOPS,
    "actors/rollout/actor.py: Rollout._handle": "the attempt, whose calls, turns and writes have deadlines each",
    "actors/rollout/harnesses/conversations.py: Conversations._ask": "the end of a turn that was just cut",
    "actors/rollout/harnesses/conversations.py: Conversations.begin": "a turn, which [engine] deadline_s ends",
    "actors/rollout/harnesses/episode.py: HarnessEpisode._act": CANCELLED,
    "actors/rollout/harnesses/episode.py: HarnessEpisode._run": "a program, which has a time limit",
    "actors/rollout/harnesses/tunnel.py: Tunnel._feed": LOOPS,
    "actors/rollout/pins.py: Promoted._keep": "holds the promoted version until another promotion or the end",
    "actors/rollout/policies.py: Policies._branch": OWN,
    "actors/rollout/policies.py: Policies.load": LOOPS,
    "actors/rollout/turn_log.py: TurnLog.flush": "a publication, which has the bus's deadline",
    "actors/search.py: Search._embed": LOOPS,
    "actors/trainer/actor.py: Trainer.stop": "the last step's writes, which have the bus's deadline",
    "actors/trainer/actor.py: Trainer._batch": "the next closings, named for still_waiting",
    "actors/trainer/actor.py: Trainer._train": STEP,
    "actors/trainer/actor.py: Trainer._announce": STEP,
    "actors/trainer/actor.py: Trainer._keep": STEP,
    "actors/trainer/other_ranks.py: close": "the trainer's thread, as in stop; after a failure it has a deadline",
    "actors/trainer/closings.py: Closings.follow": "a step with its batch: its first forward pass resumes, or its end",
    "bus/broker/server.py: _ended": "watches the broker's process; a caller that ends it has a deadline and kills it",
    "bus/nats/client.py: NatsClient.deliveries_handled": "its one caller, NatsConnection.unsubscribe, has a deadline",
    "bus/nats/consumer.py: Consumer.withdrawn": "the pump ends the subscription, with a deadline",
    "bus/nats/connection.py: NatsConnection.call": "a timer of the call ends it at its deadline",
    "bus/nats/connection.py: _faithfully": "nats-py's code: callers have deadlines, or it only fills a buffer",
    "bus/runtime/actor.py: Actor.news": LOOPS,
    "bus/runtime/delivery.py: DeliveryHandler.run": "an acknowledgement, which has the bus's deadline",
    "chaos/run.py: FaultInjector._claim": "the run's end cancels it, --minutes ends the run",
    "chaos/run.py: FaultInjector._until_at_work": "the run's end cancels it, --minutes ends the run",
    "cli/dashboard.py: _serve": LOOPS,
    "cli/vm.py: follow": "a sandbox's call that answers within a second, with the channel's deadline",
    "engines/server/engine.py: OneServer._bring_back": "watches the server's process without end",
    "engines/server/engine.py: OneServer._send": CANCELLED,
    "engines/server/load.py: Admission.place": INSIDE,
    "engines/server/load.py: Admission.watch": LOOPS,
    "engines/server/process.py: Server.stop": GONE,
    "engines/server/weights/checksums.py: Expectations.of": "the same computation in a thread, for another server",
    "engines/server/weights/lock.py: Gate.empty": INSIDE,
    "engines/server/weights/lock.py: Gate.enter": INSIDE,
    "engines/server/weights/swap.py: Swapper.change": OWN,
    "engines/sglang/transport.py: Transport._buckets": "the copy of a bucket into shared memory",
    "gateway/agents/store.py: Agents._store_end": "a session changes at its end, and the sweep ends idle ones",
    "gateway/endpoints.py: Endpoints._spent": CLIENT,
    "gateway/endpoints.py: Endpoints._samples.sample": CLIENT,
    "gateway/tenants/limits.py: Rounds.enter": "a pass of the event loop for each request of the tenant before it",
    "gateway/endpoints.py: Endpoints._end": CLIENT,
    "gateway/endpoints.py: _cancel": CANCELLED,
    "gateway/serving.py: ClientServing._ask": "the request has a deadline of its own, TURN_S",
    "gateway/serving.py: ClientServing._cut": CANCELLED,
    "gateway/serving.py: ClientServing._ended": "a turn under way, which has TURN_S",
    "gateway/serving.py: ClientServing._keep": "another write of the session, whose requests have deadlines",
    "gateway/serving.py: ClientServing.begin": "a turn under way, which has TURN_S; a client that leaves ends the wait",
    "actors/rollout/client_turns.py: ClientTurns._telling": CANCELLED,
    "engines/base.py: Progress.news": "cancelled with the turn whose parts it waits for",
    "gateway/http.py: guarded.respond": CLIENT,
    "harness/mcp/connection.py: _Session._own": "holds a connection open until it is told to close it",
    "launch/guests.py: prepare_host": "a build that prints its progress and that Ctrl-C ends; then a killed process",
    "launch/measuring/evaluation.py: ask": "the results, or the end of the run's processes, which the keeper reports",
    "launch/session.py: looped.main": "the command itself",
    "launch/supervision/children.py: Child.stop": GONE,
    "launch/supervision/children.py: Child.wait": "its callers watch the process, or end it with a deadline",
    "launch/supervision/children.py: _ended": GONE,
    "launch/supervision/signals.py: interruptible": LOOPS,
    "replay/rejudge.py: LiveScores.more": "`headrace retrain --follow` follows without end; a lost broker ends it",
    "sandboxes/remote.py: RemoteSandbox._until_answered": "a watch ends it once the node can no longer answer",
    "vmhost/backends/container/backend.py: ContainerBackend.settle": OWN,
    "vmhost/backends/process.py: ProcessBackend.settle": OWN,
    "vmhost/channel.py: Channel._send": "a future that closing the channel has just resolved",
    "vmhost/network.py: NetworkGate._relay": "the guest takes more bytes; the end of its sandbox cancels the relay",
    "vmhost/node/host.py: Host.acquire": START,
    "vmhost/node/host.py: Host._admit": START,
    "vmhost/node/host.py: Host._start": START,
    "vmhost/node/host.py: Host.close": GONE,
    "vmhost/node/pool.py: Pool.close": OWN,
    "vmhost/node/pool.py: Pool._discard": START,
    "vmhost/node/sandbox.py: VmSandbox._run": "an operation, which has the deadline of its kind (protocol.deadline_s)",
    "vmhost/qemu/backend.py: CloneBackend.filled": OWN,
    "vmhost/qemu/backend.py: CloneBackend.settle": GONE,
    "vmhost/qemu/backend.py: CloneBackend.close": CANCELLED,
    "vmhost/qemu/clone.py: Clone.blame": GONE,
    "vmhost/qemu/clone.py: Clone._close": GONE,
    "vmhost/qemu/clone.py: Clone.ready": "a call of the guest with the channel's deadline",
    "vmhost/qemu/clone.py: Clone.start": GONE,
    "vmhost/templates/template.py: _freeze": GONE,
    "weights/chain.py: build": "the fetch of a chunk, which has the bus's deadline",
    "weights/publishing/release.py: upload.finish_first": "the write of a chunk, which has the bus's deadline",
}
"""`file: function`, and why its waits end or may last. Before you add one, read the function that ends the wait."""


def name_of(call: ast.expr) -> str:
    """The last name of what is called; empty for anything but a call of a name."""
    called = call.func if isinstance(call, ast.Call) else call
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


def lasts(awaited: ast.expr) -> bool:
    """Whether this is a wait for another task, thread or process without a deadline of its own."""
    if not isinstance(awaited, ast.Call):
        return True
    name = name_of(awaited)
    if ast.unparse(awaited.func) == "asyncio.wait":
        return not any(keyword.arg == "timeout" for keyword in awaited.keywords)
    if name in ("shield", "wait_for"):
        return True
    alone = not awaited.args and not awaited.keywords
    return alone and isinstance(awaited.func, ast.Attribute) and name in METHODS


def waits(tree: ast.AST) -> Iterator[str]:
    """The functions, as qualified names, of all waits without a deadline; one entry for each wait."""
    todo: list[tuple[ast.AST, str, bool]] = [(tree, "", False)]
    while todo:
        node, scope, limited = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            scope, limited = f"{scope}.{node.name}".lstrip("."), False
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            limited = limited or any(name_of(item.context_expr) in DEADLINES for item in node.items)
        elif isinstance(node, ast.Await) and not limited and lasts(node.value):
            yield scope
        todo += [(child, scope, limited) for child in ast.iter_child_nodes(node)]


def found(root: Path) -> Counter[str]:
    """`file: function` of each wait without a deadline, with their number."""
    places: Counter[str] = Counter()
    for path in sorted(root.rglob("*.py")):
        if "await " in (source := path.read_text()):
            places.update(f"{path.relative_to(root)}: {function}" for function in waits(ast.parse(source)))
    return places


def test_the_scan_tells_waits_with_a_deadline_from_those_without(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(
        "async def bare(work): await work\n"
        "async def event(event): await event.wait()\n"
        "async def queue(self): return await self.queue.get()\n"
        "async def kept(work): await asyncio.shield(work)\n"
        "async def several(work): await asyncio.wait([work])\n"
        "async def limited(work):\n    async with asyncio.timeout(1):\n        await work\n"
        "async def inner(work):\n    async with asyncio.timeout(1):\n        async def later(): await work\n"
        "async def patient(work): await asyncio.wait([work], timeout=1)\n"
        "async def record(bucket): await bucket.get('key')\n"
        "async def coroutine(): await other()\n"
    )
    assert found(tmp_path) == Counter(
        {f"x.py: {name}": 1 for name in ("bare", "event", "queue", "kept", "several", "inner.later")}
    )


def test_every_wait_has_a_deadline_or_a_reason() -> None:
    places = set(found(ROOT / "headrace"))
    assert sorted(places - set(REVIEWED)) == [], "give the wait a deadline (asyncio.timeout) or list it with a reason"
    assert sorted(set(REVIEWED) - places) == [], "remove the reasons of waits that are gone"
