"""Law 11: no task is trained on whose tests were not examined with its own solution; the opt-in is explicit."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from secrets import token_hex
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from headrace.actors.certifier import Certifier
from headrace.actors.curriculum import Curriculum
from headrace.actors.environment.actor import Environment as EnvironmentActor
from headrace.bus.errors import Unrecoverable
from headrace.cli.main import main
from headrace.config import Config, Environment, Evaluation, Production, Run, Tasks
from headrace.config import Rollout as Waits
from headrace.judging import HostMachines
from headrace.judging.certifying import certify
from headrace.launch.checks import actors
from headrace.launch.checks import suites as checks
from headrace.messages.sandbox import ANY_RUN
from headrace.messages.subjects import EVENT
from headrace.messages.tasks import Grading, Oracle, SandboxLimits, Task, TaskRef, TestPlan
from headrace.tasks import Suite, certificates, open_suite
from headrace.tasks.generated import notes, repositories
from headrace.tasks.generated.templates import UNSEEN
from headrace.vmhost.node.host import Host
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.folder_suites import write_suite
from tests.support.patience import PATIENCE_S
from tests.support.playing import report

pytestmark = pytest.mark.anyio


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    opened = await Host.open(Environment(backend="process", max_vms=2))
    yield opened
    await opened.close()


def messages(folder: Path, answer: str = "2", pattern: str = "2") -> Suite:
    """A suite of one task without a sandbox: the last line of a message has to match a pattern."""
    ref, plan = TaskRef("sums", "1"), TestPlan(kind="command", argv=("true",))
    task = Task(ref=ref, family="sums", prompt="1 + 1?", files={}, allowed=(), tests=plan, sandbox=False)
    grading = Grading(kind="checker", checker="pattern", reference={"pattern": pattern})
    oracle = Oracle(ref=ref, hidden={}, tests=plan, expected=(), solution={}, answer=answer, grading=grading)
    return write_suite("sums", folder / "suites" / "sums", [(task, oracle)], "made by a test")


def config(folder: Path, environment: Environment | None = None, **changes: Any) -> Config:
    return Config(
        environment=environment or Environment(),
        run=Run(dir=str(folder)),
        production=Production(enabled=False),
        evaluation=Evaluation(before=False, after=False),
        tasks=Tasks(dir=str(folder / "suites"), suite="sums", heldout="sums", unseen="sums", **changes),
    )


def refused(folder: Path, **changes: Any) -> list[str]:
    return [finding.text for finding in checks.check(config(folder, **changes)) if finding.part == "tasks.suite"]


async def certified(folder: Path, suite: Suite) -> None:
    machines: Any = None  # no sandbox is used
    made = await certify(suite, "1", machines, report)
    certificates.write(suite, [made], folder / "suites" / "certificates")


async def test_the_train_lane_refuses_a_suite_without_certificates(connect: Connect, tmp_path: Path) -> None:
    suite = messages(tmp_path)
    actor = Curriculum(config(tmp_path), await connect("curriculum"), "r1", "c-1")
    with pytest.raises(Unrecoverable, match=r"suite sums has no certificates.*headrace tasks certify sums"):
        await actor.start()
    await actor.shut(1.0)
    assert "has no certificates" in refused(tmp_path)[0] and not refused(tmp_path, uncertified=True)
    await certified(tmp_path, suite)
    assert not refused(tmp_path)
    async with living(Curriculum, config(tmp_path), await connect("curriculum"), "r2"):
        pass


async def test_a_changed_task_voids_its_certificate(tmp_path: Path) -> None:
    await certified(tmp_path, messages(tmp_path))
    messages(tmp_path, pattern="2|two")
    assert "task 1 of suite sums was changed after it was certified" in refused(tmp_path)[0]


@pytest.mark.parametrize(
    ("answer", "pattern", "why"),
    [
        ("2", ".*", "refused: the untouched repository passes"),
        ("3", "2", "refused: the known solution passes 0 of 5 times"),
        ("", "2", "uncertifiable: there is no known solution"),
    ],
)
async def test_a_suite_whose_verdicts_say_nothing_is_refused(
    tmp_path: Path, answer: str, pattern: str, why: str
) -> None:
    await certified(tmp_path, messages(tmp_path, answer, pattern))
    assert why in refused(tmp_path)[0]


async def test_a_forged_certificate_is_refused(tmp_path: Path) -> None:
    await certified(tmp_path, messages(tmp_path, pattern=".*"))
    path = certificates.file_of("sums", tmp_path / "suites" / "certificates")
    path.write_text(path.read_text().replace('"refused"', '"certified"').replace("the untouched repository passes", ""))
    assert "was changed after it was written" in refused(tmp_path)[0]


@pytest.mark.parametrize("kind", [*repositories.SEEDS, *notes.SEEDS])
def test_the_bundled_certificates_are_of_these_templates(kind: str, tmp_path: Path) -> None:
    """Each template of the suite, with this generator and this sealing; refresh: headrace tasks certify --bundled."""
    suite = open_suite(f"generated/{kind}")
    assert certificates.refusal(suite, tmp_path, False) == ""
    made = certificates.read(suite.name, tmp_path)
    assert made is not None and len(made.certificates) == len(certificates.sample_of(suite))
    mutants = sum(each.mutants for each in made.certificates)
    assert sum(each.killed for each in made.certificates) >= 0.95 * mutants, "more than 5 % are accepted wrongly"


def test_another_template_or_generator_voids_the_bundled_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mix = open_suite("mix/generated/unseen*2+generated/unseen*1")
    assert certificates.refusal(mix, tmp_path, False) == ""
    with monkeypatch.context() as patched:
        patched.setattr(repositories, "_edges", lambda function: [])
        assert "was changed after it was certified" in certificates.refusal(mix, tmp_path, False)
        assert "was changed after" in certificates.AtIssue(mix, tmp_path).refusal("0~20001")
    assert certificates.AtIssue(mix, tmp_path).refusal("0~20001") == ""
    first, *others = UNSEEN
    broken = msgspec.structs.replace(first, about="anything")
    monkeypatch.setattr(repositories, "_POOLS", {"unseen": (broken, *others)})
    assert "its templates have changed" in certificates.refusal(mix, tmp_path, False)


async def test_a_task_that_changes_while_a_run_is_on_is_not_issued(tmp_path: Path) -> None:
    suite = messages(tmp_path)
    await certified(tmp_path, suite)
    check = certificates.AtIssue(suite, tmp_path / "suites")
    assert check.refusal("1") == ""
    messages(tmp_path, pattern="2|two")
    assert "task 1 of suite sums was changed after it was certified" in check.refusal("1")


async def test_the_judge_certifies_a_repository(host: Host) -> None:
    """A task with tests, and the same with a leak, in real sandboxes."""
    suite = open_suite("generated/dev")
    made = await certify(suite, "10000", HostMachines(host), report, backend=host.backend)
    assert (made.verdict, made.gold_passed, made.noop, made.stub) == ("certified", 5, "failed", "failed")
    assert made.killed >= 1 and not made.leaks

    class Leaky:
        name, ids = suite.name, suite.ids

        def task(self, id: str) -> Task:
            return msgspec.structs.replace(suite.task(id), prompt=f"pass {suite.oracle(id).expected[0]}")

        def oracle(self, id: str) -> Oracle:
            return msgspec.structs.replace(suite.oracle(id), solution={})

    assert (await certify(Leaky(), "10000", HostMachines(host), report)).verdict == "uncertifiable"


async def test_the_certifier_examines_what_has_no_certificate(connect: Connect, tmp_path: Path) -> None:
    """Curriculum, certifier and environment over the broker; the certificates are there for the next run, too."""
    dev, ref = open_suite("generated/dev"), TaskRef("sums", "1")
    task = msgspec.structs.replace(dev.task("10000"), ref=ref)
    oracle = msgspec.structs.replace(dev.oracle("10000"), ref=ref)
    suite = write_suite("sums", tmp_path / "suites" / "sums", [(task, oracle)], "made by a test")
    settings = config(tmp_path, certify=True, environment=Environment(backend="process", max_vms=4))
    assert any("no process has the actor 'certifier'" in finding.text for finding in actors.check(settings))
    observer, run = await connect("admin"), f"r{token_hex(4)}"
    async with (
        living(EnvironmentActor, settings, await connect("environment", node="n1"), ANY_RUN),
        living(Certifier, settings, await connect("certifier"), run),
        living(Curriculum, settings, await connect("curriculum"), run),
        asyncio.timeout(PATIENCE_S),
    ):
        async for received in observer.follow("HR_EVENT", EVENT.where(run=run, actor="curriculum", type="event")):
            if received.message.kind == "certified":
                break
    assert not refused(tmp_path)
    made = certificates.read("sums", tmp_path / "suites")
    assert made is not None and made.certificates[0].backend == "process"
    assert made.certificates[0].task_hash == certificates.task_hash(suite.task("1"), suite.oracle("1"))


async def test_what_the_certifier_refuses_is_not_issued(connect: Connect, tmp_path: Path) -> None:
    messages(tmp_path, pattern=".*")
    settings, run = config(tmp_path, certify=True), f"r{token_hex(4)}"
    async with living(Certifier, settings, await connect("certifier"), run):
        with pytest.raises(Unrecoverable, match="the untouched repository passes"):
            async with living(Curriculum, settings, await connect("curriculum"), run), asyncio.timeout(PATIENCE_S):
                await asyncio.Event().wait()


async def test_a_task_that_cannot_run_holds_up_no_other(connect: Connect, tmp_path: Path) -> None:
    dev = open_suite("generated/dev")
    pairs = []
    for number, limits in (("1", SandboxLimits(memory_mib=1 << 22)), ("2", UNSET)):
        ref = TaskRef("sums", number)
        task = msgspec.structs.replace(dev.task("10000"), ref=ref, limits=limits)
        pairs.append((task, msgspec.structs.replace(dev.oracle("10000"), ref=ref)))
    write_suite("sums", tmp_path / "suites" / "sums", pairs, "made by a test")
    settings = config(tmp_path, certify=True, environment=Environment(backend="process", max_vms=4))
    run = f"r{token_hex(4)}"
    async with (
        living(EnvironmentActor, settings, await connect("environment", node="n1"), ANY_RUN),
        living(Certifier, settings, await connect("certifier"), run),
    ):
        why = r"1 of 2 tasks of suite sums are not certified, such as 1 \(refused: the task cannot run here: "
        with pytest.raises(Unrecoverable, match=why):
            async with living(Curriculum, settings, await connect("curriculum"), run), asyncio.timeout(PATIENCE_S):
                await asyncio.Event().wait()


async def test_a_run_without_a_certifier_does_not_wait_for_ever(connect: Connect, tmp_path: Path) -> None:
    messages(tmp_path, pattern=".*")
    settings = msgspec.structs.replace(config(tmp_path, certify=True), rollout=Waits(wait_s=0.4))
    with pytest.raises(Unrecoverable, match=r"no certifier of run .* was alive for 0.4 s"):
        async with living(Curriculum, settings, await connect("curriculum"), "r0"), asyncio.timeout(PATIENCE_S):
            await asyncio.Event().wait()


async def test_certificates_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await certified(tmp_path, messages(tmp_path))
    where = ["--set", f"tasks.dir={tmp_path / 'suites'}"]
    assert main(["tasks", "show", "sums", *where]) == 0
    assert "1 of 1 tasks are certified" in capsys.readouterr().out
    assert main(["tasks", "show", "other", *where]) == 2
