"""The judge actor with a rubric: the model's answers are a part of the reward, and its failures are infrastructure."""

from hashlib import sha256
from pathlib import Path

import msgspec
import pytest

from headrace.actors.environment.actor import Environment
from headrace.actors.judge import Judge
from headrace.bus.errors import Unrecoverable
from headrace.cli.replay import verdicts
from headrace.config import Judge as Section
from headrace.judging.rubrics.judge import RubricJudge
from headrace.judging.rubrics.pin import model_hash
from headrace.judging.rubrics.rubric import RubricError
from headrace.messages.rollout import SlotFailed
from headrace.messages.sandbox import ANY_RUN
from headrace.messages.subjects import FAIL, TRAJ
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.judge_server import Noise, judge_server
from tests.support.judging import FIXED, PATH, TASK, config, first, judged, trajectory

pytestmark = pytest.mark.anyio
RUBRIC = """
name = "r"
[[criteria]]
id = "right"
text = "It is right."
weight = 3.0
[[criteria]]
id = "messy"
text = "It is messy."
pitfall = true
"""


def weights(folder: Path) -> Path:
    model = folder / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    return model


def test_the_hash_of_a_model_follows_from_all_of_its_files(tmp_path: Path) -> None:
    first = model_hash("m", str(weights(tmp_path)))
    assert model_hash("n", str(tmp_path / "model")) == first
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    assert model_hash("m", str(tmp_path / "model")) != first
    with pytest.raises(RubricError, match="holds no "):
        model_hash("m", str(tmp_path / "nothing"))


async def test_a_rubric_is_a_part_of_the_reward_and_a_silent_endpoint_is_no_answer(
    connect: Connect, tmp_path: Path
) -> None:
    observer = await connect("admin")
    (tmp_path / "rubric.toml").write_text(RUBRIC)
    truth = {line for line in FIXED.decode().splitlines() if line.strip() and line.encode() not in TASK.files[PATH]}
    noise = {"It is right.": Noise(), "It is messy.": Noise()}
    async with judge_server(truth, noise) as server:
        section = Section(
            rubric=str(tmp_path / "rubric.toml"), model_url=server.url, model="m", rubric_weight=0.3, model_s=60.0
        )
        settings = config(tmp_path, judge=section)
        async with living(Environment, settings, await connect("environment", node="n1"), ANY_RUN):
            async with living(Judge, settings, await connect("judge"), "jr"):
                good = trajectory("jr", "g1", {PATH: FIXED}, slot=0)
                right = await judged(observer, good)
                wrong = await judged(observer, trajectory("jr", "g1", {}, slot=1))
            assert right.rubric is not None and wrong.rubric is not None
            assert right.rubric.model_hash == wrong.rubric.model_hash == sha256(b"m").hexdigest()
            for changes in ({"model": "other"}, {"model_folder": str(weights(tmp_path))}, {"model_votes": 1}):
                other = config(tmp_path, judge=msgspec.structs.replace(section, **changes))
                with pytest.raises(Unrecoverable, match="judge has source hash"):
                    async with living(Judge, other, await connect("judge"), "jr"):
                        pass
            # The truthful judge finds both statements met: (3 - 1) / 3.
            assert right.parts == {"verdict": 1.0, "rubric": pytest.approx(0.3 * 2 / 3)}
            assert right.reward == sum(right.parts.values()) and right.passed
            assert (wrong.reward, wrong.rubric.value, wrong.rubric.calls) == (0.0, 0.0, 6)
            server.broken = True
            short = msgspec.structs.replace(section, model_s=0.2)
            async with living(Judge, config(tmp_path / "fresh", judge=short), await connect("judge"), "jf"):
                lost = trajectory("jf", "g1", {PATH: FIXED})
                await observer.publish(TRAJ.at(run="jf", group="g1"), lost, msg_id="jf.g1")
                failed = await first(
                    observer, "HR_LEDGER", FAIL.where(run="jf"), lambda message: isinstance(message, SlotFailed)
                )
            assert failed.reason == "judge_endpoint" and "no usable answer" in failed.detail
        # From the records alone: the same reward without a request, another one under another weight.
        asked = len(server.requests)
        assert (await verdicts(settings, None)(good, right)).reward == right.reward
        heavier = config(tmp_path, judge=msgspec.structs.replace(section, rubric_weight=0.6))
        judge = RubricJudge.of(heavier)
        again = await verdicts(heavier, None, judge)(good, right)
        assert judge is not None and again.parts["rubric"] == pytest.approx(0.4) and len(server.requests) == asked
        await judge.close()
