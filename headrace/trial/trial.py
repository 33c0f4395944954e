"""Takes a run's model through every part that a step has, on this machine: trainer, engine, renderer, weights,
sandboxes.

    trainer loads -> version 0 to the engine -> a turn is sampled -> scored again, step -> version 1 to the engine
    -> a turn is sampled -> scored again, step -> one sandbox of each kind of machine

The engine gets the bytes that the trainer would publish, by its own way of loading a version. The second step scores
again what the engine sampled with them: so both versions are compared, the loaded and the trained one.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace.actors.trainer import initial_policy
from headrace.config import Config
from headrace.engines.base import Engine, EngineError, Sample, SampleRequest, UnusableEngine
from headrace.engines.registry import EngineSetup, opener
from headrace.errors import HeadraceError
from headrace.harness.prompt import whole_prompt
from headrace.harness.tools.registry import schemas_of
from headrace.harness.tools.toolbox import tools_of
from headrace.messages.rollout import PolicyRef, Sampling
from headrace.messages.sandbox import Acquire, Exec
from headrace.messages.tasks import Task
from headrace.policy.layout import hugging_face
from headrace.rendering.base import Renderer
from headrace.rendering.registry import Renderers
from headrace.tasks import certificates, open_suite
from headrace.tasks.base import both_sides
from headrace.tasks.sandboxes import for_task
from headrace.training import opening
from headrace.training.outcome import StepOutcome
from headrace.training.served.publication import Publication
from headrace.training.trainer import PolicyTrainer
from headrace.trial import records
from headrace.vmhost.node.host import Host

ATTEMPTS = 4
"""Samples of a turn: the advantages of a group need some that pass and some that do not."""
MACHINES = 8
"""Most kinds of machines of which a sandbox is opened."""
MOST_DLP = 1.0
"""Largest difference of a token's log-probability between sampler and trainer, in nats, outside of exact mode: kernels
of two programs differ by a few hundredths, other weights by several."""
MOST_K3 = 0.05
"""Largest mean of k3, in nats a token."""


class TrialFailed(HeadraceError):
    """A part does not work with this run's model; the text names the key to change."""


class Part(NamedTuple):
    """A part that worked."""

    name: str
    seconds: float
    text: str


class Trial:
    """One trial. folder: for the trainer's files."""

    def __init__(self, config: Config, folder: Path, tell: Callable[[Part], None]) -> None:
        training = msgspec.structs.replace(config.trainer, rescore=ATTEMPTS)
        none = msgspec.structs.replace(config.mid_training, tokens=0)
        objective = msgspec.structs.replace(config.algorithm, warmup_steps=0)
        self.config = msgspec.structs.replace(config, trainer=training, mid_training=none, algorithm=objective)
        self.folder, self._tell = folder, tell

    async def run(self) -> None:
        """All parts in order. TrialFailed and other HeadraceErrors."""
        config = self.config
        bundle = initial_policy.bundle(config, self.folder)
        task, _ = both_sides(suite := open_suite(config.tasks.suite, config.tasks.dir), suite.ids()[0])
        with self._part("render") as said:
            renderer = Renderers(bundle).open(schemas_of(tools_of(task)))
            prompt = renderer.prompt(whole_prompt(task.system, task.prompt))
            stops = ", ".join(f"{id} {renderer.tokenizer.decode([id])!r}" for id in renderer.stop_ids)
            said.append(f"{len(prompt)} tokens of task {task.ref.task}, calls in {bundle.renderer}, stops at {stops}")
            left = config.limits.context_tokens - len(prompt)
            if left < config.limits.max_turn_tokens:
                raise TrialFailed(
                    f"limits.context_tokens: the first prompt has {len(prompt)} tokens, so a turn of "
                    f"limits.max_turn_tokens = {config.limits.max_turn_tokens} does not fit into "
                    f"{config.limits.context_tokens}: raise it"
                )
        with self._part("trainer loads") as said:
            trainer = await asyncio.to_thread(self._open_trainer, bundle.tokenizer_json)
            said.append(f"version {trainer.version}")
        try:
            async with self._engine() as engine:
                for version in (0, 1):
                    await self._version(version, trainer, engine, renderer, task, prompt)
        finally:
            await asyncio.to_thread(trainer.close)
        await self._sandboxes()

    def _open_trainer(self, tokenizer_json: str) -> PolicyTrainer:
        return opening.prepare(self.config, self.folder, tokenizer_json=tokenizer_json, traces=tuple)

    @asynccontextmanager
    async def _engine(self) -> AsyncIterator[Engine]:
        async def tokenizer() -> Path | None:
            return self.folder / "tokenizer.json"

        with self._part("engine starts") as said:
            section = self.config.engine
            setup = EngineSetup(section, hugging_face.of_run(self.config), self.folder, self.folder, "try", tokenizer)
            try:
                engine = await opener(section)(setup)
            except UnusableEngine as error:
                raise TrialFailed(f"engine.kind = {section.kind!r}: {error}") from None
            said.append(f"{section.kind}, arithmetic {engine.fingerprint[:12]}")
        try:
            yield engine
        finally:
            await engine.stop()

    async def _version(
        self, version: int, trainer: PolicyTrainer, engine: Engine, renderer: Renderer, task: Task, prompt: list[int]
    ) -> None:
        """Load a version into the engine, sample with it, and score the samples again in a step."""
        with self._part(f"version {version} to the engine") as said:
            folder = self.folder / "snapshots"
            folder.mkdir(exist_ok=True)
            publication = await asyncio.to_thread(_published, trainer, folder)
            path, digest = publication.durable.result(), publication.hashed.result()
            try:
                swap = await engine.load(version, str(path), digest)
            except EngineError as error:
                raise TrialFailed(f"engine.weights: version {version} is not served: {error}") from None
            said.append(f"{path.stat().st_size / (1 << 30):.2f} GiB, paused {swap.pause_ms:.0f} ms")
        with self._part(f"sample with version {version}") as said:
            samples = await self._sample(engine, renderer, prompt, version)
            count = sum(len(sample.ids) for sample in samples)
            said.append(
                f"{ATTEMPTS} turns, {count} tokens; the first: {renderer.tokenizer.decode(samples[0].ids)!r:.60}"
            )
        with self._part(f"score again and step to version {version + 1}") as said:
            made = records.batch(task, prompt, samples, version, engine.fingerprint)
            outcome = await asyncio.to_thread(trainer.step, *made)
            self._judge(outcome)
            planned, peak = outcome.planned_bytes / (1 << 30), outcome.peak_bytes / (1 << 30)
            said.append(
                f"largest difference {outcome.max_abs_dlp:.2g} nats over {outcome.rescored_tokens} tokens, gradient "
                f"{outcome.grad_norm:.3g}; memory {peak:.2f} of {planned:.2f} GiB planned"
            )

    async def _sample(self, engine: Engine, renderer: Renderer, prompt: list[int], version: int) -> list[Sample]:
        sampling = Sampling(
            temperature=self.config.curriculum.temperature, max_turn_tokens=self.config.limits.max_turn_tokens
        )
        wanted = [
            SampleRequest(
                session=f"try-{version}-{number}", ids=tuple(prompt), policy=PolicyRef(), sampling=sampling,
                stop_ids=renderer.stop_ids, seed=ATTEMPTS * version + number,
            )
            for number in range(ATTEMPTS)
        ]  # fmt: skip
        try:
            samples = await asyncio.gather(*map(engine.sample, wanted))
        except EngineError as error:
            raise TrialFailed(f"engine: it does not sample a turn: {error}") from None
        finally:
            for request in wanted:
                await engine.close(request.session)
        return list(samples)

    def _judge(self, outcome: StepOutcome) -> None:
        """Refuse a step that failed or whose sampler computes other numbers."""
        if outcome.failed:
            raise TrialFailed(f"trainer: the step failed ({outcome.failed}): {outcome.detail}")
        exact = self.config.engine.exact
        if outcome.rescored_tokens and outcome.max_abs_dlp > (0.0 if exact else MOST_DLP):
            key = "engine.exact = true, and" if exact else f"engine.kind = {self.config.engine.kind!r}:"
            raise TrialFailed(
                f"{key} sampler and trainer differ by {outcome.max_abs_dlp:.3g} nats in a token: the engine computes "
                "another model, by config.json, weights or arithmetic"
                + ("; set engine.exact = false to train nevertheless" if exact else "")
            )
        if outcome.k3 > MOST_K3:
            raise TrialFailed(
                f"engine.kind = {self.config.engine.kind!r}: sampler and trainer differ by {outcome.k3:.3g} nats a "
                "token"
            )

    async def _sandboxes(self) -> None:
        """Open a sandbox of each kind of machine that the suite's tasks need, and run a program in it."""
        config = self.config
        suite = open_suite(config.tasks.suite, config.tasks.dir)
        tasks: dict[str, Task] = {}
        for id in certificates.sample_of(suite)[:5000]:
            task, _ = both_sides(suite, id)
            if task.sandbox:
                tasks.setdefault(task.machine, task)
        host = await Host.open(msgspec.structs.replace(config.environment, warm=0), limits=config.sandboxes)
        try:
            for number, (machine, task) in enumerate(list(tasks.items())[:MACHINES]):
                with self._part(f"sandbox {machine}") as said:
                    wanted = Acquire(
                        run="try", lane="train", role="rollout", group=f"try-{number}", slot=0, attempt=0,
                        isolation=config.environment.isolation,
                    )  # fmt: skip
                    sandbox = await host.acquire(for_task(wanted, task))
                    done = await sandbox.call(Exec(argv=("sh", "-c", "ls | wc -l")))
                    if not done.ok:
                        raise TrialFailed(f"environment.backend: {machine} runs no program: {done.error}")
                    said.append(f"{len(task.files)} files of task {task.ref.task}")
        finally:
            await host.close()

    @contextmanager
    def _part(self, name: str) -> Iterator[list[str]]:
        """Time a part; what it says goes into the list."""
        said: list[str] = []
        began = time.monotonic()
        yield said
        self._tell(Part(name, time.monotonic() - began, "; ".join(said)))


def _published(trainer: PolicyTrainer, folder: Path) -> Publication:
    """The current version's file, complete."""
    publication = trainer.publish(folder)
    publication.wanted.set()
    publication.durable.result()
    return publication
