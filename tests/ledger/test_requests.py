"""The one builder of requests: every lane's request follows from its ledger record and its settings."""

import msgspec

from headrace import config as c
from headrace.ledger.requests import limits_of, settings_of
from headrace.messages.rollout import PolicyRef
from tests.support import records


def test_the_request_of_a_record_is_always_the_same() -> None:
    issued = records.issued("g000001", 1, 2, oldest=3)
    config = c.Config(limits=c.Limits(max_turns=3, wall_s=7.0))
    request = settings_of(config, 0.5).request(issued)
    assert request == settings_of(config, 0.5).request(issued)
    assert (request.trajectory, request.min_version, request.seed) == ("g000001-1-2", 3, 7)
    assert (request.sampling.seed, request.sampling.temperature) == (7, 0.5)
    assert (request.limits.max_turns, request.limits.wall_s) == (3, 7.0)


def test_every_limit_of_a_request_has_a_key_in_the_configuration() -> None:
    config = c.Config(
        limits=c.Limits(
            max_turns=91,
            max_tokens=92,
            context_tokens=93,
            wall_s=94.0,
            max_parallel_calls=95,
            reserve_tokens=96,
        )
    )
    assert set(msgspec.structs.astuple(limits_of(config.limits))) == {91, 92, 93, 94.0, 95, 96, 64}


def test_a_users_prompt_and_files_replace_the_tasks() -> None:
    settings = msgspec.structs.replace(
        settings_of(c.Config(), 1.0), policy=PolicyRef("pinned", 4), prompt="mend it", files={"a.py": b"x"}
    )
    request = settings.request(records.issued("g000001", 0, 0))
    assert (request.policy.version, request.prompt, request.files) == (4, "mend it", {"a.py": b"x"})
