"""A rubric judge over real HTTP: its card recovers planted noise, its answers are cached, its failures are ours."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from headrace.cli.measure import card_of
from headrace.config import Config, ConfigError, Run, parse
from headrace.config import Judge as Section
from headrace.judging import Candidate
from headrace.judging.rubrics.client import EndpointFailed, EndpointRefused
from headrace.judging.rubrics.judge import RubricError, RubricJudge
from headrace.messages.tasks import Criterion
from headrace.tasks import open_suite
from tests.launch.test_up import command
from tests.support.judge_server import Noise, judge_server
from tests.support.judging import FIXED, ORACLE, PATH, TASK, trajectory

pytestmark = pytest.mark.anyio
SOUND, POOR, FIRST, WORDY = "It is right.", "It is elegant.", "It is friendly.", "It is complete."
NOISE = {SOUND: Noise(0.05, 0.04), POOR: Noise(0.35, 0.0), FIRST: Noise(0.0, 0.3), WORDY: Noise(0.05, 0.0, 0.5)}
RUBRIC = """
name = "house-rules"

[[criteria]]
id = "right"
text = "It is right."
weight = 2.0

[[criteria]]
id = "elegant"
text = "It is elegant."
pitfall = true
"""


def section(folder: Path, url: str, rubric: str = RUBRIC, **changes: Any) -> Config:
    (folder / "rubric.toml").write_text(rubric)
    judge = Section(rubric=str(folder / "rubric.toml"), model_url=url, model="m1", model_prices=(2.0, 10.0))
    return Config(run=Run(dir=str(folder)), judge=msgspec.structs.replace(judge, **changes))


def pairs(statement_ids: list[str]) -> tuple[list[dict[str, str]], set[str]]:
    """Labels that are true by construction: the solution of a generated task against its planted fault. In every other
    pair one of the two is made longer."""
    suite = open_suite("generated/train")
    labels, good = [], set()
    for number, id in enumerate(suite.ids()[:200]):
        task, ((path, solution), *_) = suite.task(id), suite.oracle(id).solution.items()
        right, wrong = solution.decode(), task.files[path].decode()
        comment = "# " + "words " * 100
        right, wrong = (right + comment, wrong) if number % 2 else (right, wrong + comment)
        right, wrong = f"{right}\n# {id} right", f"{wrong}\n# {id} wrong"
        good.add(right)
        labels += [{"criterion": each, "task": task.prompt, "met": right, "not_met": wrong} for each in statement_ids]
    return labels, good


@pytest.mark.slow
async def test_the_card_recovers_what_was_planted(tmp_path: Path) -> None:
    criteria = {"right": SOUND, "elegant": POOR, "friendly": FIRST, "complete": WORDY}
    rubric = 'name = "r"\n' + "".join(f'[[criteria]]\nid = "{id}"\ntext = "{text}"\n' for id, text in criteria.items())
    labels, good = pairs(list(criteria))
    (tmp_path / "labels.jsonl").write_text("\n".join(map(json.dumps, labels)))
    async with judge_server(good, NOISE) as server:
        config = section(tmp_path, server.url, rubric, model_votes=1, model_parallel=32)
        card = await card_of(config, str(tmp_path / "labels.jsonl"))
        asked = len(server.requests)
        again = await card_of(config, str(tmp_path / "labels.jsonl"))
        assert len(server.requests) == asked == card.calls, "every answer came from the cache"
        settings = [f"judge.{key}={json.dumps(value)}" for key, value in msgspec.to_builtins(config.judge).items()
                    if key.startswith(("rubric", "model")) and value != ""]  # fmt: skip
        words = [word for each in (f'run.dir="{tmp_path}"', *settings) for word in ("--set", each)]
        done = await asyncio.to_thread(command, tmp_path, "eval", "--judge", "labels.jsonl", *words)
        assert done.returncode == 1 and "right: kappa 0.8" in done.stdout and "weight 0: kappa 0." in done.stdout
        assert json.loads((tmp_path / "card.json").read_text())["judge"] == card.judge
    measured = {criterion.id: criterion for criterion in card.criteria}
    for id, text in criteria.items():
        planted, criterion = NOISE[text], measured[id]
        assert criterion.pairs == 200
        if not planted.longer:
            # Balanced labels: a share `first` of answers follows the order, the others are wrong with `wrong`.
            assert criterion.kappa_low <= (1 - planted.first) * (1 - 2 * planted.wrong) <= criterion.kappa_high
            assert abs(criterion.length_bias) < 0.15
        assert criterion.flips == pytest.approx(planted.first, abs=0.05)
    assert measured["right"].retest > 0.85 > measured["elegant"].retest
    assert measured["complete"].length_bias == pytest.approx(0.5 * 0.95 * 0.5, abs=0.1)
    assert [criterion.counts for criterion in card.criteria] == [True, False, False, True]
    assert "kappa" in measured["elegant"].reason and "order" in measured["friendly"].reason
    assert [criterion.kappa for criterion in again.criteria] == [criterion.kappa for criterion in card.criteria]
    assert card.cost == pytest.approx(asked * (100 * 2 + 10 * 10) / 1e6)


def candidate(criteria: tuple[Criterion, ...] = ()) -> Candidate:
    oracle = msgspec.structs.replace(ORACLE, rubric=criteria)
    return Candidate(trajectory=trajectory("r", "g", {PATH: FIXED}), task=TASK, oracle=oracle)


async def test_criteria_that_the_card_rejects_weigh_nothing_and_answers_are_bought_once(tmp_path: Path) -> None:
    labels, good = pairs(["right", "elegant"])
    (tmp_path / "labels.jsonl").write_text("\n".join(map(json.dumps, labels[:40])))
    truth = {line for line in FIXED.decode().splitlines() if line.strip() and line.encode() not in TASK.files[PATH]}
    async with judge_server(
        good | truth, NOISE | {SOUND: Noise(), POOR: Noise(0.5), "It is brief.": Noise()}
    ) as server:
        config = section(tmp_path, server.url)
        task_criteria = (Criterion(id="brief", text="It is brief.", weight=1.0),)
        judge = RubricJudge.of(config)
        assert judge is not None
        first, second = await judge.judge(candidate(task_criteria)), await judge.judge(candidate(task_criteria))
        await judge.close()
        assert first is not None and second is not None
        assert (first.calls, first.cached, second.calls, second.cached) == (9, 0, 0, 9)
        clear = [
            (criterion.id, criterion.weight, criterion.met) for criterion in first.criteria if criterion.id != "elegant"
        ]
        assert clear == [("right", 2.0, 1.0), ("brief", 1.0, 1.0)]
        elegant = first.criteria[1].met
        assert first.value == pytest.approx((3.0 - elegant) / 3.0) and first.digest == second.digest
        card = await card_of(config, str(tmp_path / "labels.jsonl"))
        (tmp_path / "card.json").write_bytes(msgspec.json.encode(card))
        with_card = msgspec.structs.replace(config.judge, rubric_card=str(tmp_path / "card.json"))
        judge = RubricJudge.of(msgspec.structs.replace(config, judge=with_card))
        assert judge is not None
        third = await judge.judge(candidate())
        await judge.close()
        assert (
            third is not None
            and [criterion.weight for criterion in third.criteria] == [2.0, 0.0]
            and third.value == 1.0
        )
        assert [criterion.agreement and criterion.agreement.kappa for criterion in third.criteria] == [
            criterion.kappa for criterion in card.criteria
        ]
        assert all(criterion.agreement is None for criterion in first.criteria)
        assert third.digest != first.digest
        with pytest.raises(RubricError, match="is the card of m1/"):
            RubricJudge.of(msgspec.structs.replace(config, judge=msgspec.structs.replace(with_card, model="m2")))
        (tmp_path / "rubric.toml").write_text(RUBRIC.replace(SOUND, "It is quite right."))
        with pytest.raises(RubricError, match="'right' in its present wording"):
            RubricJudge.of(msgspec.structs.replace(config, judge=with_card))


async def test_what_may_pass_is_asked_again_and_what_does_not_is_never_an_answer(tmp_path: Path) -> None:
    async with judge_server({"def "}, {SOUND: Noise(), POOR: Noise()}) as server:
        config = section(tmp_path, server.url, model_votes=1, model_parallel=1)
        judge = RubricJudge.of(config)
        assert judge is not None
        server.failures += [
            web.Response(status=429, text="slow down", headers={"Retry-After": "0"}),
            web.Response(status=500, text="broken"),
            "no JSON at all",
            '{"reason": "a verdict that there is not", "verdict": "maybe"}',
            'Here you are:\n```json\n{"reason": "fenced", "verdict": "met"}\n```',
        ]
        score = await judge.judge(candidate())
        assert score is not None and len(server.requests) == 6 and score.calls == 2
        assert score.criteria[0].reason == "fenced"
        await judge.close()
        server.broken = True
        short = msgspec.structs.replace(config.judge, model_s=1.0)
        judge = RubricJudge(short, tmp_path / "other.sqlite")
        with pytest.raises(EndpointFailed, match="no usable answer within 1 s: "):
            await judge.judge(candidate())
        await judge.close()
        server.broken = False
        server.failures.append(web.Response(status=401, text="unknown key"))
        (tmp_path / "key").write_text("a-key\n")
        keyed = msgspec.structs.replace(short, model_key_file=str(tmp_path / "key"))
        judge = RubricJudge(keyed, tmp_path / "other.sqlite")
        with pytest.raises(EndpointRefused, match="refuses model 'm1' with status 401: unknown key"):
            await judge.judge(candidate())
        await judge.close()
        assert server.authorization == "Bearer a-key"
        (tmp_path / "key").unlink()
        with pytest.raises(EndpointRefused, match=r"\[judge\] model_key_file: .*/key cannot be read"):
            RubricJudge.of(msgspec.structs.replace(config, judge=keyed))


@pytest.mark.parametrize(
    ("rubric", "says"),
    [
        (RUBRIC.replace("elegant", "right", 1), "'right' occurs twice"),
        (RUBRIC.replace("weight = 2.0", "weight = -2.0"), "expected a weight above 0"),
        (RUBRIC.replace("pitfall", "trap"), "unknown field `trap`"),
        (
            'name = "x"\n[[criteria]]\nid = "a"\ntext = "b"\npitfall = true\n',
            "at least one criterion that is no pitfall",
        ),
    ],
)
def test_a_wrong_rubric_is_refused_by_name(tmp_path: Path, rubric: str, says: str) -> None:
    with pytest.raises(RubricError, match=says):
        RubricJudge.of(section(tmp_path, "http://127.0.0.1:1/v1", rubric))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[judge]\nrubric = "r.toml"', "judge.model_url"),
        ('[judge]\nmodel_url = "http://h/v1"', "expected the name of a model"),
        ('[judge]\nrubric_weight = 0.5\n[algorithm]\nreward = "m:f"', "decides itself what a rubric is worth"),
    ],
)
def test_keys_that_do_not_fit_together_are_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(text)
