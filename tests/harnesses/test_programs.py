"""Which harness a group has, and the command with which it starts."""

from collections import Counter

import pytest

from headrace.config import ConfigError, Program, load, parse
from headrace.config.harnesses import HARNESSES
from headrace.harnesses.programs import KNOWN, of_group, started
from headrace.ledger.requests import training_settings
from headrace.messages.ledger import SlotIssued
from tests.support.records import of


def test_all_attempts_of_a_group_have_one_harness_and_weights_count() -> None:
    mix = (("codex", 3), ("own", 1))
    counts = Counter(of_group(mix, f"g{number:06}") for number in range(4000))
    assert 2900 < counts["codex"] < 3100 and counts["own"] == 4000 - counts["codex"]


def test_a_request_names_the_harness_of_its_group() -> None:
    config = parse('[harness]\nname = "codex"\n', "test")
    issued = [of(SlotIssued, group="g000001", slot=slot, index=1) for slot in range(2)]
    assert {training_settings(config).request(each).harness for each in issued} == {"codex"}
    assert not training_settings(load("")).request(issued[0]).harness


def test_a_prompt_is_one_word_and_stands_for_itself() -> None:
    program = Program(install="pip:", command=("python", "-m", "mine", "{prompt}", "--url={url}/x"))
    values = {"prompt": "say {key}", "url": "http://u", "key": "k", "home": "/h", "bundle": "/b"}
    made = started(program, {"python": ("/b/ld", "/b/python")}, ("--more",), values)
    assert made.argv == ("/b/ld", "/b/python", "-m", "mine", "say {key}", "--url=http://u/x", "--more")
    assert made.env["OPENAI_BASE_URL"] == "http://u/v1" and made.env["OPENAI_API_KEY"] == "k"
    assert made.env["HOME"] == "/h"


def test_the_names_of_the_configuration_are_those_of_the_table() -> None:
    assert tuple(KNOWN) == HARNESSES


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('[harness]\nname = "aider"\n', "harness.name"),
        ("[harness]\nmix = {own = 1, aider = 2}\n", "harness.mix"),
        ('[harnesses.mine]\ninstall = "curl:x"\ncommand = ["x"]\n', "harnesses.mine.install"),
        ('[harnesses.mine]\ninstall = "pip:x"\ncommand = []\n', "harnesses.mine.command"),
    ],
)
def test_a_harness_that_cannot_be_is_refused(text: str, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        parse(text, "test")
