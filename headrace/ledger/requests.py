"""Builds every RolloutRequest, from a ledger record that names the attempt and from the settings of its lane.

Curriculum, evaluator, gateway and command line all build their requests here, so the lanes cannot differ. The request
depends on nothing else: a successor that builds the request of a recorded attempt again gets the same one.
"""

import msgspec
from msgspec import UNSET

from headrace import config as sections
from headrace.harnesses import programs
from headrace.messages.ledger import SlotIssued
from headrace.messages.rollout import Limits, PolicyRef, RolloutRequest, Sampling, Workspace
from headrace.messages.sandbox import Isolation


class RequestSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a RolloutRequest that are the same for many attempts."""

    sampling: Sampling
    """Its seed is not used: every attempt samples with the seed of its ledger record."""
    limits: Limits
    isolation: Isolation
    policy: PolicyRef = PolicyRef()
    prompt: str = ""
    """Replaces the task's prompt, unless it is empty."""
    files: dict[str, bytes] = {}
    """Replace the task's files, unless there are none."""
    workspace: Workspace | None = None
    harnesses: tuple[tuple[str, int], ...] = ()
    """Names and weights, of which each group has one; none: headrace's own agent."""

    def request(self, issued: SlotIssued) -> RolloutRequest:
        """The request of a recorded attempt."""
        harness = programs.of_group(self.harnesses, issued.group) if self.harnesses else programs.OWN
        return RolloutRequest(
            run=issued.run,
            lane=issued.lane,
            group=issued.group,
            slot=issued.slot,
            attempt=issued.attempt,
            task=issued.task,
            seed=issued.seed,
            min_version=issued.min_version,
            policy=self.policy,
            sampling=msgspec.structs.replace(self.sampling, seed=issued.seed),
            limits=self.limits,
            isolation=self.isolation,
            prompt=self.prompt,
            files=self.files,
            workspace=self.workspace,
            harness=harness if harness != programs.OWN else UNSET,
        )


def limits_of(limits: sections.Limits) -> Limits:
    """The limits of an episode from a section of the configuration."""
    return Limits(
        max_turns=limits.max_turns,
        max_tokens=limits.max_tokens,
        context_tokens=limits.context_tokens,
        wall_s=limits.wall_s,
        max_parallel_calls=limits.max_parallel_calls,
        reserve_tokens=limits.reserve_tokens,
    )


def training_settings(config: sections.Config) -> RequestSettings:
    """The settings of training groups."""
    return with_harness(config, settings_of(config, config.curriculum.temperature))


def with_harness(config: sections.Config, settings: RequestSettings) -> RequestSettings:
    """The settings of attempts in which `[harness]` acts."""
    mix = config.harness.mix or {config.harness.name: 1}
    return msgspec.structs.replace(settings, harnesses=tuple(sorted(mix.items())))


def settings_of(config: sections.Config, temperature: float) -> RequestSettings:
    """The settings that the configuration gives to every lane."""
    return RequestSettings(
        sampling=Sampling(temperature=temperature, max_turn_tokens=config.limits.max_turn_tokens),
        limits=limits_of(config.limits),
        isolation=config.environment.isolation,
    )
