"""A rubric judge: a model votes on every criterion; answers to known questions come from the cache."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec

from headrace.config import Config
from headrace.config import Judge as Section
from headrace.judging.candidates import Candidate
from headrace.judging.rubrics import card as cards
from headrace.judging.rubrics.cache import Answer, Cache
from headrace.judging.rubrics.card import Card
from headrace.judging.rubrics.client import Endpoint
from headrace.judging.rubrics.pin import model_hash, pinned
from headrace.judging.rubrics.questions import VERSION, question, schema, work_of
from headrace.judging.rubrics.rubric import Rubric, RubricError, check, digest, load, value
from headrace.messages.judging import CriterionScore, RubricScore
from headrace.messages.plugins import Plugin
from headrace.messages.tasks import Criterion

TEMPERATURE = 0.7
"""Sampling temperature of the model's answers."""
REASON = 400
"""Characters of a reason that a Score keeps."""


class Usage(msgspec.Struct):
    """Requests and tokens for one attempt."""

    calls: int = 0
    cached: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class RubricJudge:
    """A judge model with the criteria of a configuration."""

    def __init__(self, section: Section, cache: Path) -> None:
        """cache: file of the answers by content. RubricError, EndpointRefused: a wrong
        configuration."""
        self._section = section
        self.model_hash = model_hash(section.model, section.model_folder)
        self.rubric = load(section.rubric) if section.rubric else Rubric(name="", criteria=())
        self.card: Card | None = cards.load(section.rubric_card) if section.rubric_card else None
        if self.card is not None:
            self.card.require(self.identity, self.rubric.criteria, section.rubric_card)
        self._endpoint = Endpoint(
            section.model_url,
            section.model,
            key_file=section.model_key_file,
            within_s=section.model_s,
            parallel=section.model_parallel,
        )
        self._cache = Cache(cache)

    @classmethod
    def of(cls, config: Config) -> "RubricJudge | None":
        """The judge of a configuration; None where it names no model."""
        return cls(config.judge, Path(config.run.dir) / "rubrics.sqlite") if config.judge.model_url else None

    @property
    def identity(self) -> str:
        """The subject of a card: the model, its settings, and the version of the instructions."""
        section = self._section
        return f"{self._model}/t{TEMPERATURE:g}/v{section.model_votes}/q{VERSION}"

    @property
    def _model(self) -> str:
        """The model's name, with the hash of its folder if that is configured: other weights are another model."""
        section = self._section
        return f"{section.model}@{self.model_hash}" if section.model_folder else section.model

    @property
    def plugin(self) -> Plugin:
        """The record by which the judges of a run agree."""
        return pinned(digest(self.model_hash, self.identity, self.rubric.criteria, self.card))

    async def close(self) -> None:
        """Close connections and cache."""
        await self._endpoint.close()
        self._cache.close()

    async def judge(self, candidate: Candidate) -> RubricScore | None:
        """The criteria of the configuration and of the task; None without any. EndpointFailed, EndpointRefused."""
        criteria = (*self.rubric.criteria, *candidate.oracle.rubric)
        if not criteria:
            return None
        check(criteria, f"task {candidate.task.ref.task} of {candidate.task.ref.suite}")
        usage, work = Usage(), work_of(candidate)
        scores = await asyncio.gather(*(self._criterion(each, candidate.task.prompt, work, usage) for each in criteria))
        section = self._section
        prices = section.model_prices
        return RubricScore(
            rubric=self.rubric.name,
            digest=digest(criteria, self.identity, self.card),
            model=section.model,
            model_hash=self.model_hash,
            value=value(scores),
            criteria=tuple(scores),
            calls=usage.calls,
            cached=usage.cached,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cost=(usage.prompt_tokens * prices[0] + usage.completion_tokens * prices[1]) / 1e6,
        )

    async def _criterion(self, criterion: Criterion, task: str, work: str, usage: Usage) -> CriterionScore:
        answers = await self.votes(criterion, task, work, usage)
        keeps = self.card is None or self.card.keeps(criterion)
        return CriterionScore(
            id=criterion.id,
            weight=criterion.weight if keeps else 0.0,
            pitfall=criterion.pitfall,
            met=sum(answer.met for answer in answers) / len(answers),
            reason=answers[0].reason[:REASON],
            agreement=None if self.card is None else self.card.agreement(criterion),
        )

    async def votes(self, criterion: Criterion, task: str, work: str, usage: Usage) -> Sequence[Answer]:
        """The votes on one criterion; the order of the words alternates, so that a position bias cancels."""
        return await asyncio.gather(
            *(
                self.answer(criterion.text, task, work, usage, order=vote % 2, seed=vote)
                for vote in range(self._section.model_votes)
            )
        )

    async def answer(self, statement: str, task: str, work: str, usage: Usage, *, order: int, seed: int) -> Answer:
        """One answer. EndpointFailed, EndpointRefused."""
        messages = question(statement, task, work, order)
        key = digest(messages, self._model, TEMPERATURE, seed)
        cached = self._cache.get(key)
        if cached is not None:
            usage.cached += 1
            return cached
        completion = await self._endpoint.complete(messages, schema(order), seed=seed, temperature=TEMPERATURE)
        usage.calls += 1
        usage.prompt_tokens += completion.prompt_tokens
        usage.completion_tokens += completion.completion_tokens
        answer = Answer(
            met=completion.reply["verdict"] == "met",
            reason=str(completion.reply["reason"]),
            prompt_tokens=completion.prompt_tokens,
            completion_tokens=completion.completion_tokens,
        )
        self._cache.put(key, answer)
        return answer


__all__ = ["RubricError", "RubricJudge", "Usage"]
