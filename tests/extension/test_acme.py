"""A distribution outside of the tree registers one plugin for each seam, and an episode runs with all of them."""

import importlib
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import registry
from headrace.actors.curriculum import Curriculum
from headrace.actors.environment.actor import Environment as EnvironmentActor
from headrace.actors.judge import Judge
from headrace.actors.rollout.actor import Rollout
from headrace.actors.trainer.actor import Trainer
from headrace.algorithms.advantages import Attempt
from headrace.algorithms.corrections import Correction, SampledTokens
from headrace.algorithms.registry import ADVANTAGES, LOSSES
from headrace.algorithms.rewards import REWARDS
from headrace.bus.errors import Unrecoverable
from headrace.bus.runtime.actor import Actor
from headrace.bus.runtime.plugins import key_of
from headrace.config import Algorithm, Config, Environment, MidTraining, Production, Tasks
from headrace.config.training import Data
from headrace.harness.loop import run_episode
from headrace.harness.scripted import ScriptedEngine, script
from headrace.harness.tools.registry import TOOLS, schemas_of
from headrace.judging import Candidate, HostMachines, Options, certifying, examine
from headrace.judging.scoring import Rewarder, score_of, scored_again
from headrace.messages.judging import Score
from headrace.messages.operations import Event
from headrace.messages.plugins import Plugin
from headrace.messages.rollout import PolicyRef, RolloutRequest, Sampling, Trajectory
from headrace.messages.sandbox import ANY_RUN, Acquire, PullTree
from headrace.messages.subjects import EVENT, FAIL, SCORE, TASK, TRAJ, token
from headrace.rendering import schemas
from headrace.rendering.bundle import terse_bundle
from headrace.rendering.registry import RENDERERS
from headrace.rendering.tokenizer import Tokenizer
from headrace.tasks import open_suite
from headrace.tasks.suites import SUITES, suite_plugins
from headrace.training.data import opening
from headrace.training.data.base import DataError
from headrace.training.data.mixture import Mixture
from headrace.training.data.registry import READERS
from headrace.vmhost.backends.registry import BACKENDS
from headrace.vmhost.node.host import Host
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.judging import FIXED, PATH, config, first, judged, trajectory
from tests.support.paths import ROOT

pytestmark = pytest.mark.anyio
SEAMS: dict[str, registry.Registry[Any]] = {
    "count-lines": TOOLS,
    "acme": SUITES,
    "half": REWARDS,
    "best_of": ADVANTAGES,
    "plain": LOSSES,
    "pairs": READERS,
}


@pytest.fixture(autouse=True)
def acme(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The distribution is installed, as far as Python's import system can tell."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    registry._entry_points.cache_clear()
    yield
    registry._entry_points.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme"]:
        del sys.modules[name]


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    opened = await Host.open(Environment(backend="acme", max_vms=8))
    assert opened.backend == "acme"
    yield opened
    await opened.close()


def test_every_seam_finds_its_plugin_with_version_and_hash() -> None:
    for name, seam in [*SEAMS.items(), ("acme", RENDERERS), ("acme", BACKENDS)]:
        assert name in seam.names() and not seam.builtin(name)
        plugin = seam.plugin(name)
        assert plugin is not None
        assert (plugin.seam, plugin.version, len(plugin.source)) == (seam.seam, "1.5", 64)


async def test_an_episode_with_a_plugin_in_each_seam(host: Host) -> None:
    suite = open_suite("acme/3")
    task, oracle = suite.task("1"), suite.oracle("1")
    slot: dict[str, Any] = {"run": "acme", "lane": "eval", "group": "g1", "slot": 0, "attempt": 0, "seed": 1}
    bundle = terse_bundle(Tokenizer.train((), 256 + len(schemas.tags())).dump())
    renderer = RENDERERS.get("acme")(bundle, Tokenizer.parse(bundle.tokenizer_json), schemas_of(task.tools))
    turns = [[("count_lines", {"path": "README.md"}), ("count_lines", {"path": "no"})], *script("oracle", task, oracle)]
    sandbox = await host.acquire(Acquire(**slot, role="rollout", isolation="episode", files=task.files))
    played = await run_episode(
        engine=ScriptedEngine(turns, renderer),
        sandbox=sandbox,
        renderer=renderer,
        request=RolloutRequest(**slot, task=task.ref),
        task=task,
    )
    lines = len(task.files["README.md"].splitlines())
    assert [result.output for result in played.turns[0].results] == [f"{lines} lines", "no: No such file or directory"]
    assert (played.outcome, played.malformed_calls) == ("finished", 0)

    diff = (await sandbox.call(PullTree(patterns=task.allowed))).files
    slot |= {"policy": PolicyRef(), "sampling": Sampling(), "isolation": "episode", "task": task.ref, "family": "acme"}
    candidate = Candidate(
        trajectory=Trajectory(**slot, id="g1-0-0", outcome="finished", turns=played.turns, diff=diff),
        task=task,
        oracle=oracle,
    )

    async def report(*event: object, **data: object) -> None: ...

    verdict = await examine(candidate, HostMachines(host), report, Options())
    rewarder = Rewarder("half", {}, 5.0, {"share": 0.25})
    reward = await rewarder.reward(candidate.trajectory, verdict)
    score = score_of(candidate, 7, verdict, reward, by=rewarder, wall_s=0.0)
    assert (score.verdict, score.reward) == ("passed", 0.75)
    behind = [("suites", "acme"), ("sandboxes", "acme")]
    assert [(plugin.seam, plugin.name) for plugin in score.plugins] == [("rewards", "half"), *behind]
    again = scored_again(
        score,
        candidate.trajectory,
        verdict,
        1.0,
        Rewarder("shaped", {}, 5.0),
    )
    assert [(plugin.seam, plugin.name) for plugin in again.plugins] == behind

    attempts = [Attempt(reward, candidate.trajectory, score) for reward in (score.reward, 0.0)]
    advantages = ADVANTAGES.get("best_of")(attempts)
    assert advantages == [1.0, 0.0]
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss = LOSSES.get("plain")(SampledTokens(logp, logp.detach(), torch.tensor(advantages)), Correction())
    loss.terms.sum().backward()  # type: ignore[no-untyped-call]
    assert logp.grad is not None and logp.grad.tolist() == [1.0, 0.0]


async def test_a_judge_uses_the_reward_of_its_configuration_and_nodes_agree_on_it(
    connect: Connect, tmp_path: Path
) -> None:
    observer = await connect("admin")
    settings = config(tmp_path, algorithm=Algorithm(reward="half"))
    async with (
        living(EnvironmentActor, settings, await connect("environment", node="n1"), ANY_RUN),
        living(Judge, settings, await connect("judge"), "acme1"),
    ):
        score = await judged(observer, trajectory("acme1", "g1", {PATH: FIXED}))
        assert (score.reward, [plugin.name for plugin in score.plugins]) == (1.0, ["half"])
    (plugin,) = score.plugins
    state = await observer.kv("HR_PLUGINS")
    assert (await state.get(key_of("judge", "acme1", plugin))) is not None
    other = Plugin(seam=plugin.seam, name=plugin.name, version="1.4", source="0" * 64)
    await state.put(key_of("trainer", "acme2", plugin), other)
    refused = Judge(settings, await connect("judge"), "acme2", "j-1")
    with pytest.raises(Unrecoverable, match=r"half has source hash .* on this node and 000000000000 \(version 1\.4\)"):
        await refused.start()
    await refused.shut(1.0)


async def test_a_score_of_a_run_names_every_plugin(connect: Connect, tmp_path: Path) -> None:
    observer = await connect("admin")
    tasks = Tasks(dir=str(tmp_path), suite="acme/3", heldout="acme/3", unseen="acme/3")
    settings = config(
        tmp_path,
        algorithm=Algorithm(reward="half"),
        environment=Environment(backend="acme", max_vms=8),
        tasks=tasks,
        production=Production(enabled=False),
    )
    request = RolloutRequest(
        run="acme4",
        lane="eval",
        group="g1",
        slot=0,
        attempt=0,
        seed=1,
        task=open_suite("acme/3").task("1").ref,
        policy=PolicyRef(kind="scripted", name="oracle"),
    )
    async with (
        living(EnvironmentActor, settings, await connect("environment", node="n1"), "acme4"),
        living(Rollout, settings, await connect("rollout"), "acme4"),
        living(Judge, settings, await connect("judge"), "acme4"),
    ):
        await observer.publish(TASK.at(run="acme4", lane="eval", suite=token(request.task.suite)), request)
        score = await first(observer, "HR_SCORE", SCORE.where(run="acme4"), lambda found: isinstance(found, Score))
    assert (score.verdict, score.reward) == ("passed", 1.0)
    names = [("rewards", "half"), ("suites", "acme"), ("tools", "count-lines"), ("sandboxes", "acme")]
    assert [(plugin.seam, plugin.name, plugin.version) for plugin in score.plugins] == [
        (*name, "1.5") for name in names
    ]


async def test_a_certificate_names_the_sandbox_backend(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    async def report(*event: object, **data: object) -> None: ...

    monkeypatch.setattr(certifying, "GOLD_RUNS", 1)
    monkeypatch.setattr(certifying, "MUTANTS", 0)
    made = await certifying.certify(open_suite("acme/3"), "1", HostMachines(host), report, backend=host.backend)
    assert (made.verdict, made.gold_passed) == ("certified", 1)
    assert [(plugin.seam, plugin.name, plugin.version) for plugin in made.plugins] == [
        ("suites", "acme", "1.5"),
        ("sandboxes", "acme", "1.5"),
    ]


@pytest.mark.parametrize(
    ("actor", "role", "seam"),
    [(EnvironmentActor, "environment", BACKENDS), (Trainer, "trainer", LOSSES), (Curriculum, "curriculum", SUITES)],
)
async def test_a_node_with_another_source_is_refused(
    connect: Connect, tmp_path: Path, actor: type[Actor], role: str, seam: registry.Registry[Any]
) -> None:
    name = "plain" if seam is LOSSES else "acme"
    here = seam.plugin(name)
    assert here is not None
    state = await (await connect("admin")).kv("HR_PLUGINS")
    await state.put(key_of("judge", "acme5", here), Plugin(seam=here.seam, name=name, version="1.4", source="0" * 64))
    settings = config(
        tmp_path,
        algorithm=Algorithm(weighting="plain"),
        environment=Environment(backend="acme"),
        tasks=Tasks(dir=str(tmp_path), suite="acme/3", uncertified=True),
    )
    refused = actor(settings, await connect(role), "acme5", "a-1")
    with pytest.raises(Unrecoverable, match=r"has source hash .* on this node and 000000000000 \(version 1\.4\)"):
        await refused.start()
    await refused.shut(1.0)


async def test_a_reward_that_raises_is_an_error_and_the_third_in_a_row_ends_the_run(
    connect: Connect, tmp_path: Path
) -> None:
    observer = await connect("admin")
    registry.admit("rewards", ["acme.rewards:broken"])
    settings = config(tmp_path, algorithm=Algorithm(reward="acme.rewards:broken"))
    async with living(EnvironmentActor, settings, await connect("environment", node="n1"), ANY_RUN):
        judge = Judge(settings, await connect("judge"), "acme3", "j-1")
        await judge.start()
        try:
            for slot in range(3):
                made = trajectory("acme3", "g1", {PATH: FIXED}, slot=slot)
                await observer.publish(TRAJ.at(run="acme3", group="g1"), made)
            error = await judge.failed
        finally:
            await judge.shut(1.0)
    assert isinstance(error, Unrecoverable) and "3 times in a row" in str(error)
    assert 'raise LookupError(f"no reward for {judged.trajectory.id}")' in str(error)
    where = EVENT.where(run="acme3", actor="judge", type="event")
    kinds = [r.message.kind async for r in observer.history("HR_EVENT", where) if isinstance(r.message, Event)]
    assert kinds.count("reward_error") == 2
    failed = [r.message.reason async for r in observer.history("HR_LEDGER", FAIL.where(run="acme3"))]
    scores = [r.message async for r in observer.history("HR_SCORE", SCORE.where(run="acme3"))]
    assert (failed, scores) == (["reward_error"] * 2, [])


def test_suites_of_headrace_are_no_plugins() -> None:
    assert suite_plugins(["generated/train", "a-folder"]) == ()
    assert [plugin.name for plugin in suite_plugins(["acme/2", "mix/acme/2*2+generated/train"])] == ["acme"]


def test_the_page_of_the_public_api_names_what_there_is() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    rows = re.findall(r"^\| `([\w.]+)` \| (.+?) \|", text, re.MULTILINE)
    assert len(rows) > 10
    for module, names in rows:
        for name in re.findall(r"`(\w+)`", names):
            assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


def test_each_seam_is_shown_in_less_than_25_lines() -> None:
    text = (ROOT / "docs" / "extending.md").read_text()
    shown = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(shown) >= 7
    for code in shown:
        assert len(code.splitlines()) < (45 if "Backend" in code else 25)  # a server has seven methods
        compile(code, "docs/extending.md", "exec")


def test_the_first_example_runs() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "hello_episode.py")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith(": 2 turns, finished, passed")
    assert len((ROOT / "examples" / "hello_episode.py").read_text().splitlines()) <= 40


def test_a_reader_of_training_data_and_the_faults_of_one(tmp_path: Path) -> None:
    file = tmp_path / "a.pairs"
    file.write_text('{"question": "1 + 1 is", "answer": "2"}\n' * 2 + '{"question": "and"}\n')
    bundle = terse_bundle(Tokenizer.train((), 300).dump())

    def opened(kind: str) -> Mixture:
        recipe = MidTraining(data=(Data(kind=kind, path=str(file)),), held_out=0.0)
        return opening.mixture(Config(mid_training=recipe), bundle, lambda: iter(()))

    with pytest.raises(DataError, match=r"a\.pairs, line 3: the reader 'pairs' raised KeyError: 'answer'"):
        opened("pairs")
    with pytest.raises(
        DataError, match="expected one of chat, text, trajectories, pairs or module:attribute, got 'no'"
    ):
        opened("no")
    file.write_text('{"question": "1 + 1 is", "answer": "2"}\n' * 2)
    registry.admit("readers", ["acme.rewards:broken"])
    with pytest.raises(DataError, match=r"the reader 'acme\.rewards:broken' raised AttributeError"):
        opened("acme.rewards:broken")
    document = next(iter(opened("pairs")))
    assert document.teaches and document.weights.count(1.0) == 1
