"""Judges a recorded run of 1,000 attempts again from its streams, and checks the list of flipped advantages.

    python -m benchmarks.rejudge [--groups 125] [--size 8]

Scripted policies (they repair the fault, do nothing, or rewrite the visible tests, after reading some files) run real
episodes in headrace's loop over bundled tasks; the tasks' own tests decide each verdict. A rubric judge with one model
scores them, and trajectories, scores and closings are stored in a broker as an actor stores them.

Then `headrace rejudge --recorded` reads the streams and asks another judge model, and after that the first one again.
Both models are scripted, with a share of wrong answers; a model's answers follow from its weights file, whose hash
pins it in every score. So the true list of flipped advantages is known: it is computed here from the weights alone.

`missing` and `wrong` count flips that the command left out or invented; `same_*` are the figures of the first model
asked again, from the cache.
"""

import argparse
import asyncio
import contextlib
import hashlib
import io
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import uvloop
from aiohttp import web
from safetensors.numpy import load_file, save_file

from benchmarks.conditions import Figures, at_least, at_most, finish
from headrace.bus.broker.server import Server
from headrace.bus.nats.streams import declare
from headrace.cli.main import main as headrace
from headrace.config import Config, Judge, Run
from headrace.harness.loop import run_episode
from headrace.harness.scripted import NAMES, ScriptedEngine, script
from headrace.harness.sync_tools import answer
from headrace.judging import rules
from headrace.judging.candidates import Candidate, repository
from headrace.judging.rubrics.judge import RubricJudge
from headrace.judging.rubrics.questions import work_of
from headrace.judging.scoring import Rewarder, score_of
from headrace.judging.verdicts import Examination, conclude, passes
from headrace.messages.ledger import ClosedSlot, GroupClosed
from headrace.messages.rollout import Limits, PolicyRef, RolloutRequest, Sampling, Trajectory
from headrace.messages.sandbox import RunTests
from headrace.messages.subjects import CLOSE, SCORE, TRAJ
from headrace.rendering.base import Call
from headrace.rendering.terse import Format, TerseRenderer
from headrace.rendering.tokenizer import Tokenizer
from headrace.tasks import open_suite
from headrace.tasks.diff import Tree, diff
from headrace.tasks.generated import traces
from headrace.tasks.local import LocalFiles
from tests.support.keys import as_writers

RUN, SUITE = "r20260101-000000-s1", "generated/train"
REPAIRED, ECONOMICAL = "The change repairs the fault that the task describes.", "The agent reads only what it needs."
RUBRIC = f"""name = "practices"

[[criteria]]
id = "repaired"
text = "{REPAIRED}"
weight = 2.0

[[criteria]]
id = "economical"
text = "{ECONOMICAL}"
weight = 1.0
"""
WEIGHTS = {REPAIRED: 2.0, ECONOMICAL: 1.0}
RUBRIC_WEIGHT = 1.0
SHOWN = "## Work\n<"


class Models:
    """Two scripted judge models behind one OpenAI-compatible endpoint on loopback."""

    def __init__(self, folder: Path) -> None:
        self.folders = {name: folder / name for name in ("first", "second")}
        self.truth: dict[str, dict[str, bool]] = {}
        """Hash of a work to the truth about each statement."""
        self.requests = 0
        for number, (name, wrong) in enumerate([("first", 0.25), ("second", 0.05)]):
            self.folders[name].mkdir()
            weights = {"wrong": np.array([wrong, wrong]), "seed": np.array([number])}
            save_file(weights, self.folders[name] / "model.safetensors")
        self._weights = {name: load_file(folder / "model.safetensors") for name, folder in self.folders.items()}

    def met(self, model: str, statement: str, work: str) -> bool:
        """The model's answer: the truth, or in a share of the works that follows from its weights its opposite."""
        weights, key = self._weights[model], hashlib.sha256(work.encode()).hexdigest()
        number = list(WEIGHTS).index(statement)
        drawn = random.Random(f"{key} {number} {weights['seed'][0]}").random()
        return self.truth[key][statement] != (drawn < float(weights["wrong"][number]))

    async def answer(self, request: web.Request) -> web.Response:
        """POST /v1/chat/completions."""
        body = await request.json()
        self.requests += 1
        text = body["messages"][-1]["content"]
        tag, _, rest = text.partition(SHOWN)[2].partition(">\n")
        work, _, rest = rest.partition(f"\n</{tag}>\n\n## Statement\n")
        verdict = "met" if self.met(body["model"], rest.partition("\n\n## Verdict")[0], work) else "not_met"
        reply = {"role": "assistant", "content": json.dumps({"reason": "scripted", "verdict": verdict})}
        usage = {"prompt_tokens": len(text) // 4, "completion_tokens": 10}
        return web.json_response({"model": body["model"], "choices": [{"message": reply}], "usage": usage})

    @contextmanager
    def serving(self) -> Iterator[str]:
        """The URL, while a thread with an event loop of its own answers: the command has its own loop."""
        loop, ready, urls = asyncio.new_event_loop(), threading.Event(), []

        async def start() -> web.AppRunner:
            app = web.Application(client_max_size=1 << 22)
            app.router.add_post("/v1/chat/completions", self.answer)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
            return runner

        def serve() -> None:
            runner = loop.run_until_complete(start())
            ready.set()
            loop.run_forever()
            loop.run_until_complete(runner.cleanup())
            loop.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        if not ready.wait(60):
            raise RuntimeError("the scripted judge models did not start within 60 s")
        try:
            yield urls[0]
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(60)


def config(folder: Path, models: Models, url: str) -> Config:
    """The run's: the first model judges."""
    (folder / "rubric.toml").write_text(RUBRIC)
    return Config(
        run=Run(dir=str(folder)),
        judge=Judge(
            rubric=str(folder / "rubric.toml"), rubric_weight=RUBRIC_WEIGHT, model_url=url, model="first",
            model_folder=str(models.folders["first"]), model_votes=1, model_temperature=0.0,
        ),
    )  # fmt: skip


class Attempts:
    """Episodes of scripted policies on the bundled tasks, judged by the tasks' tests."""

    def __init__(self, models: Models, size: int) -> None:
        self._models, self._size, self._suite = models, size, open_suite(SUITE)
        self._renderer = TerseRenderer(Tokenizer.train(traces.tokenizer_texts(3, 150, Format(), answer), 640))
        self.works: dict[tuple[str, int], str] = {}

    async def candidate(self, group: int, slot: int) -> tuple[Candidate, Examination]:
        """One attempt, and the verdict of the hidden tests on it."""
        draws = random.Random(f"{group} {slot}")
        id = self._suite.ids()[group % len(self._suite.ids())]
        task, oracle = self._suite.task(id), self._suite.oracle(id)
        policy = draws.choices(NAMES, (3, 1, 1))[0]
        reads = draws.choices(sorted(task.files), k=draws.randrange(5))
        turns: list[list[Call]] = [[("read_file", {"path": path})] for path in reads]
        request = RolloutRequest(
            run=RUN, lane="train", group=f"g{group:06d}", slot=slot, attempt=0, task=task.ref, seed=slot,
            limits=Limits(max_turns=64, max_tokens=1 << 16, context_tokens=1 << 16), sampling=Sampling(),
            policy=PolicyRef(kind="scripted", name=policy),
        )  # fmt: skip
        sandbox = LocalFiles(task.files)
        episode = await run_episode(
            engine=ScriptedEngine([*turns, *script(policy, task, oracle)], self._renderer),
            sandbox=sandbox,
            renderer=self._renderer,
            request=request,
            task=task,
        )
        changed, _ = diff(Tree(task.files), Tree(sandbox.files), task.allowed)
        trajectory = Trajectory(
            run=RUN, lane="train", group=request.group, slot=slot, attempt=0, id=request.trajectory, task=task.ref,
            family=task.family, seed=slot, policy=request.policy, sampling=request.sampling, outcome=episode.outcome,
            turns=episode.turns, diff=changed.changed, deleted=changed.deleted, touched=changed.touched,
        )  # fmt: skip
        candidate = Candidate(trajectory=trajectory, task=task, oracle=oracle)
        # Sealed tests need the runner of a sandbox; generated code may run here as it is.
        plain = msgspec.structs.replace(oracle, sealed={})
        tested = LocalFiles(repository(task, plain, trajectory.diff, trajectory.deleted))
        tests = (await tested.call(RunTests(plan=oracle.tests))).tests
        examination = Examination(ok=passes(oracle, tests), tests=tests)
        work = work_of(candidate)
        self.works[request.group, slot] = work
        truth = {REPAIRED: examination.ok, ECONOMICAL: len(set(reads)) == len(reads) < 3}
        self._models.truth[hashlib.sha256(work.encode()).hexdigest()] = truth
        return candidate, examination


async def record(folder: Path, attempts: Attempts, groups: int, size: int, own: Config) -> list[list[tuple[bool, int]]]:
    """Store the run. Returns of every group whether each attempt earns the rubric's part, and its verdict as 0 or 1."""
    judge, rewarder = RubricJudge.of(own), Rewarder.of(own)
    assert judge is not None
    outcomes: list[list[tuple[bool, int]]] = []
    async with (
        Server(folder / "broker") as server,
        await as_writers(server.url, server.credentials) as admin,
    ):
        await declare(admin)
        for group in range(groups):
            slots, outcomes_of_group = [], []
            for slot in range(size):
                candidate, examination = await attempts.candidate(group, slot)
                made, task = candidate.trajectory, candidate.task
                suspicions = rules.suspicions(task, candidate.oracle, made.diff, made.touched)
                suspicions += rules.behaviour(task, made)
                verdict = conclude(candidate.oracle, examination, suspicions)
                verdict = msgspec.structs.replace(verdict, rubric=await judge.judge(candidate))
                reward = await rewarder.reward(made, verdict)
                at = await admin.publish(TRAJ.at(run=RUN, group=made.group), made)
                score = score_of(candidate, at, verdict, reward, by=rewarder, wall_s=0.0)
                where = SCORE.at(run=RUN, judge=score.judge_version, group=made.group)
                of = await admin.publish(where, score)
                slots.append(
                    ClosedSlot(
                        slot=slot, attempt=0, trajectory_seq=at, score_seq=of, reward=score.reward,
                        oldest_version=score.oldest_version,
                    )
                )  # fmt: skip
                outcomes_of_group.append((verdict.decision in ("passed", "failed"), int(verdict.passed)))
            closed = GroupClosed(
                run=RUN, group=made.group, task=made.task, group_size=size, slots=tuple(slots), oldest_version=-1
            )
            await admin.publish(CLOSE.at(run=RUN, group=made.group), closed)
            outcomes.append(outcomes_of_group)
    await judge.close()
    return outcomes


def true_flips(models: Models, attempts: Attempts, outcomes: list[list[tuple[bool, int]]]) -> set[tuple[str, int]]:
    """Group and slot of every advantage that changes its sign from the first model to the second, from the models'
    weights alone."""

    def signs(model: str, group: int) -> list[int]:
        rewards = []
        for slot, (honest, passed) in enumerate(outcomes[group]):
            work = attempts.works[f"g{group:06d}", slot]
            met = sum(weight for text, weight in WEIGHTS.items() if models.met(model, text, work))
            rewards.append(passed + RUBRIC_WEIGHT * met / sum(WEIGHTS.values()) * honest)
        mean = statistics.fmean(rewards)
        return [(reward > mean + 1e-9) - (reward < mean - 1e-9) for reward in rewards]

    return {
        (f"g{group:06d}", slot)
        for group in range(len(outcomes))
        for slot, (one, two) in enumerate(zip(signs("first", group), signs("second", group), strict=True))
        if one != two
    }


def judged_again(folder: Path, judge: str, *changes: str) -> tuple[Figures, float]:
    """The line of `headrace rejudge`, and its seconds."""
    started, printed = time.monotonic(), io.StringIO()
    words = [word for change in changes for word in ("--with", change)]
    with contextlib.redirect_stdout(printed):
        code = headrace(("rejudge", str(folder), "--judge", judge, "--recorded", *words))
    if code:
        raise RuntimeError(f"headrace rejudge ended with code {code}")
    report: Figures = json.loads(printed.getvalue())
    return report, time.monotonic() - started


def measure(groups: int, size: int) -> Figures:
    """Record, judge again twice, and compare."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / RUN
        folder.mkdir()
        models = Models(Path(root))
        with models.serving() as url:
            attempts, settings = Attempts(models, size), config(folder, models, url)
            (folder / "config.json").write_bytes(msgspec.json.encode(settings))
            started = time.monotonic()
            outcomes = uvloop.run(record(folder, attempts, groups, size, settings))
            record_s, asked = time.monotonic() - started, models.requests
            second = models.folders["second"]
            report, again_s = judged_again(folder, "second", 'judge.model="second"', f'judge.model_folder="{second}"')
            asked_again = models.requests - asked
            same, same_s = judged_again(folder, "first", 'judge.model="first"')
            asked_same = models.requests - asked - asked_again
    listed = {(flip["group"], flip["slot"]) for flip in report["flips"]}
    expected = true_flips(models, attempts, outcomes)
    return {
        "groups": report["groups"],
        "trajectories": report["slots"],
        "passed": sum(passed for group in outcomes for _, passed in group),
        "cheating": sum(not honest for group in outcomes for honest, _ in group),
        "rewards_changed": report["rewards_changed"],
        "advantages_flipped": report["advantages_flipped"],
        "expected_flips": len(expected),
        "missing": len(expected - listed),
        "wrong": len(listed - expected),
        "requests": asked_again,
        "again_s": round(again_s, 1),
        "same_rewards_changed": same["rewards_changed"],
        "same_flipped": same["advantages_flipped"],
        "same_requests": asked_same,
        "same_s": round(same_s, 1),
        "record_s": round(record_s, 1),
        "record_requests": asked,
    }


def main() -> None:
    """Print the figures with their targets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=125)
    parser.add_argument("--size", type=int, default=8, help="attempts of a group")
    args = parser.parse_args()
    spent = time.process_time()
    figures = measure(args.groups, args.size)
    figures["cpu_s"] = round(time.process_time() - spent, 1)
    targets = {
        "trajectories": at_least(figures["trajectories"], 1000),
        "missing": at_most(figures["missing"], 0),
        "wrong": at_most(figures["wrong"], 0),
        "same_flipped": at_most(figures["same_flipped"], 0),
        "again_s": at_most(figures["again_s"], 300.0),
    }
    finish(figures, targets)


if __name__ == "__main__":
    main()
