"""The first token of a streamed turn: at the engine, and at the client.

    python -m benchmarks.first_token [--clients 16] [--turns 20] [--beside PYTHON]

Broker, gateway and rollout actor run in processes of their own, with the embedded engine and a tiny policy. The clients
ask for one streamed turn after another, each with a short pause before, by chat completions. `engine_ms` is the time
from a request to its first token in the engine, `client_ms` that to the first event at the client, and `added_ms` their
difference per turn: what decoding, two actors, the broker and HTTP add. Then each client leaves a turn after its first
event: `cut_ms` is the time until the engine has ended it. All processes read the same clock and share the machine's
cores.

--beside: with SGLang, which the interpreter's environment has, as the engine (`make first-token`). Then as many clients
ask the same server itself, by /generate, for turns of the same lengths: `direct_ms` is the time to their first event,
`alike_ms` the same for requests with headrace's own body, which asks for log-probabilities and routes.
`rollout_cpu_ms` and `gateway_cpu_ms` are the processor times of a turn there, on cores that the server also needs.
"""

import argparse
import asyncio
import json
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import chain
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import torch
import uvloop

from benchmarks.conditions import Figures, arguments, at_most, finish
from benchmarks.gateway_abuse import cpu_s
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.nats.streams import declare
from headrace.bus.payloads import renderer_bundles
from headrace.config import AgentLimits, Config, Engine, Policy, Production, Run
from headrace.engines.server.backend import Ask
from headrace.engines.sglang.reply import body
from headrace.gateway.tenants.store import add
from headrace.messages.subjects import EVENT
from headrace.messages.weights import WeightsStaged
from headrace.parent_death import ending_with_parent
from headrace.policy.layout import hugging_face
from headrace.policy.model import Model
from headrace.policy.numerics_probe import probe
from headrace.weights import tensor_state
from tests.support.chat_formats import bundle_of_run
from tests.support.keys import as_writers
from tests.support.sglang.server_fixture import ARGUMENTS

RUN = "rfirst"
TOKENS, LONG = 64, 1024
"""Tokens of a turn, and of one that its client leaves."""
PROMPT = 40
"""Ids of the prompt of a turn, about."""
MOST = 256
"""Turns at once at SGLang."""
PAUSE_S = 0.2
"""The longest pause of a client before a turn."""
SCRIPT = """
import json, msgspec, sys, time, uvloop
from headrace.actors.gateway import Gateway
from headrace.actors.rollout import spans
from headrace.actors.rollout.actor import Rollout
from headrace.bus.runtime.supervisor import run_actors
from headrace.config import Config
from headrace.engines.base import Progress

config = msgspec.json.decode(sys.argv[1], type=Config)
actor = {"gateway": Gateway, "rollout": Rollout}[sys.argv[5]]
if actor is Rollout:
    log, sample, add, names = open(sys.argv[6], "w", buffering=1), spans.sample, Progress.add, {}

    async def named(engine, request, trajectory):
        names[id(request.progress)] = trajectory
        sampled = await sample(engine, request, trajectory)
        if sampled.stop == "abort":
            log.write(json.dumps([trajectory, time.monotonic(), "cut"]) + "\\n")
        return sampled

    def timed(self, ids, at):
        if ids and not self.ids:
            log.write(json.dumps([names[id(self)], time.monotonic(), "first"]) + "\\n")
        add(self, ids, at)

    spans.sample, Progress.add = named, timed
    from headrace.engines.server.process import Server

    start = Server.start

    async def told(self, command):
        log.write(json.dumps([self.url, time.monotonic(), "server"]) + "\\n")
        await start(self, command)

    Server.start = told
uvloop.run(run_actors([(actor, sys.argv[5] + "-1")], config, sys.argv[2], url=sys.argv[3], credentials=sys.argv[4]))
"""


async def client(
    http: aiohttp.ClientSession, url: str, number: int, turns: int, leave: bool = False
) -> list[tuple[str, float, float]]:
    """Of each turn: its session, when it was asked for, and when its first event came. leave: then leave the turn."""
    seen: list[tuple[str, float, float]] = []
    chance = random.Random(number)
    for turn in range(turns):
        await asyncio.sleep(chance.random() * PAUSE_S)
        body = {
            "model": "latest",
            "stream": True,
            "max_tokens": LONG if leave else TOKENS,
            "messages": [{"role": "user", "content": f"client {number}, turn {turn}: the mean of xs"}],
        }
        began = time.monotonic()
        async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            await answer.content.readany()
            seen.append((answer.headers["X-Headrace-Session"], began, time.monotonic()))
            if leave:
                answer.close()
            else:
                await answer.content.read()
    return seen


async def direct(http: aiohttp.ClientSession, url: str, number: int, turns: int, alike: bool) -> list[float]:
    """Milliseconds to the first event of each of a client's turns at SGLang itself. alike: with headrace's body."""
    took: list[float] = []
    chance = random.Random(number)
    for _ in range(turns):
        await asyncio.sleep(chance.random() * PAUSE_S)
        ids = [chance.randrange(300) for _ in range(PROMPT)]
        sampling = {"max_new_tokens": TOKENS, "temperature": 1.0}
        asked: dict[str, Any] = {"input_ids": ids, "sampling_params": sampling, "stream": True}
        if alike:
            ask = Ask(secrets.token_hex(16), ids, TOKENS, 1.0, (0,), 0, 0, "", "production", followed=True)
            asked = body(ask, sparse=True, seeded=False, priority=None)
        began = time.monotonic()
        async with http.post(f"{url}/generate", json=asked) as answer:
            answer.raise_for_status()
            await answer.content.readany()
            took.append((time.monotonic() - began) * 1e3)
            await answer.content.read()
    return took


async def settled(log: Path, turns: int) -> None:
    """Wait until the turns that were left have ended; one that had ended by itself is not among them."""
    for _ in range(100):
        if log.read_text().count('"cut"') >= turns:
            return
        await asyncio.sleep(0.05)


async def staged(broker: Server, folder: Path, shape: Policy) -> None:
    """A renderer bundle and a version 0 that the node of the rollout actor has."""
    policy = hugging_face.from_section(shape)
    file = folder / "0.safetensors"
    state_hash = tensor_state.write(file, Model(policy, probe(policy), seed=3).state())
    async with await Bus.connect(broker.url, role="trainer", credentials=broker.credentials) as trainer:
        await renderer_bundles.publish(trainer, RUN, bundle_of_run("hermes"))
        node = trainer.node
    async with await as_writers(broker.url, credentials=broker.credentials) as admin:
        message = WeightsStaged(
            run=RUN, node=node, region="local", version=0, path=str(file), state_hash=state_hash, stage_s=0.0
        )
        await admin.publish(EVENT.at(run=RUN, actor="weight_sync", type="weights_staged"), message)


def engine_of(beside: str) -> Engine:
    """The embedded engine, or SGLang on this machine's processor. beside: the interpreter of SGLang's environment."""
    if not beside:
        return Engine()
    args = [*ARGUMENTS, "--context-length", "2048", "--max-running-requests", str(MOST)]
    return Engine(
        kind="sglang",
        exact=False,
        max_batch=MOST,
        options={"python": str(Path(beside).absolute()), "args": [*args]},
    )


async def measure(clients: int, turns: int, beside: str, folder: Path) -> Figures:
    """Run the processes and the clients."""
    shape = Policy(dim=32, layers=2, heads=2, kv_heads=1, head_dim=16, experts=4, top_k=2, expert_dim=32, vocab=512)
    production = Production(
        rollouts=("rollout-1",),
        turns_at_once=2 * MOST,
        limits=AgentLimits(max_turn_tokens=LONG, context_tokens=2048),
    )
    engine = engine_of(beside)
    config = Config(run=Run(dir=str(folder / "runs")), policy=shape, production=production, engine=engine)
    (folder / "runs" / RUN).mkdir(parents=True)
    log = folder / "first.jsonl"
    processes: list[asyncio.subprocess.Process] = []
    async with Server(folder / "broker") as broker:
        async with await Bus.connect(broker.url, role="admin", credentials=broker.credentials) as admin:
            await declare(admin)
        async with await Bus.connect(broker.url, role="operator", credentials=broker.credentials) as operator:
            key = await add(operator, "acme", requests_per_minute=1_000_000)
        await staged(broker, folder / "runs", shape)
        try:
            for actor in ("rollout", "gateway"):
                arguments = [msgspec.json.encode(config).decode(), RUN, broker.url, str(broker.credentials), actor]
                processes.append(
                    await asyncio.create_subprocess_exec(
                        *ending_with_parent([sys.executable, "-c", SCRIPT, *arguments, str(log)]),
                        stderr=subprocess.DEVNULL,
                    )
                )
            address = folder / "runs" / RUN / "gateway.json"
            async with asyncio.timeout(120):
                while not address.exists() or not address.read_text().endswith("}"):
                    await asyncio.sleep(0.05)
            url = json.loads(address.read_text())["url"]
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(headers={"x-api-key": key}, connector=connector) as http:
                async with asyncio.timeout(600 if beside else 120):
                    while True:
                        try:
                            await client(http, url, -1, 1)
                            break
                        except aiohttp.ClientResponseError:
                            await asyncio.sleep(0.2)
                # A server's first batches compile and allocate.
                await asyncio.gather(*(client(http, url, -1 - number, 1) for number in range(clients)))
                used = [cpu_s(process.pid) for process in processes]
                seen = await asyncio.gather(*(client(http, url, number, turns) for number in range(clients)))
                used = [cpu_s(process.pid) - before for process, before in zip(processes, used, strict=True)]
                left = await asyncio.gather(
                    *(client(http, url, number, turns, leave=True) for number in range(clients))
                )
                await settled(log, clients * turns)
                at_server: dict[str, list[float]] = {}
                if beside:
                    told = [json.loads(line) for line in log.read_text().splitlines()]
                    (server,) = (name for name, _, what in told if what == "server")
                    for arm in ("direct", "alike", "alike", "direct"):
                        each = (direct(http, server, n, turns, arm == "alike") for n in range(clients))
                        at_server.setdefault(arm, []).extend(chain(*await asyncio.gather(*each)))
        finally:
            for process in processes:
                if process.returncode is None:
                    process.terminate()
                    await process.wait()
    told = [json.loads(line) for line in log.read_text().splitlines()]
    first, cut = (
        {name.rpartition("-0-0")[0]: at for name, at, what in told if what == kind} for kind in ("first", "cut")
    )
    every = [turn for each in seen for turn in each]
    cuts_ms = [(cut[session] - at) * 1e3 for each in left for session, _, at in each if session in cut]
    at_engine = [(first[session] - began) * 1e3 for session, began, _ in every]
    at_client = [(came - began) * 1e3 for _, began, came in every]
    added = [a - b for a, b in zip(at_client, at_engine, strict=True)]
    figures: dict[str, Any] = {"clients": clients, "turns": len(every), "cut": len(cuts_ms)}
    for name, cpu in zip(("rollout", "gateway"), used, strict=True):
        figures[f"{name}_cpu_ms"] = round(cpu * 1e3 / len(every), 2)
    timed = {"engine": at_engine, "client": at_client, "added": added, "cut": cuts_ms} | at_server
    for name, values in timed.items():
        cuts = statistics.quantiles(values, n=100)
        figures |= {f"{name}_p50_ms": round(cuts[49], 2), f"{name}_p99_ms": round(cuts[98], 2)}
    return figures


def main() -> None:
    """Run the benchmark and print one line of JSON."""
    parser = argparse.ArgumentParser(description="the first token of a streamed turn")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--beside", default="", metavar="PYTHON", help="the interpreter of SGLang's environment")
    args = arguments(parser, clients=2, turns=2)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        figures = uvloop.run(measure(args.clients, args.turns, args.beside, Path(folder)))
    targets = {
        "added_p50_ms": at_most(figures["added_p50_ms"], 5.0),
        "cut_p99_ms": at_most(figures["cut_p99_ms"], 100.0),
    }
    if args.beside:
        targets = {
            "client_p50_ms": at_most(figures["client_p50_ms"], figures["direct_p50_ms"] + 5.0),
            "client_p99_ms": at_most(figures["client_p99_ms"], 1.2 * figures["direct_p99_ms"]),
        }
    finish(figures, targets, "aiohttp", "torch")


if __name__ == "__main__":
    main()
