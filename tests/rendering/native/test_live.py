"""A turn never takes back what it showed while it was sampled: a reading of its beginning begins the whole."""

import json
import random
from collections.abc import Sequence

import msgspec
import pytest

from headrace.rendering.native.live import LiveTurn, Settled, arguments_json
from headrace.rendering.parsers.base import Completion, Syntax, WrittenCall
from headrace.rendering.parsers.registry import SYNTAXES
from headrace.rendering.tokenizer import Tokenizer
from tests.support.completions import call, completions

BYTES = Tokenizer.train((), 257, tags=["<end>"])
STOP = BYTES.tags["<end>"]
TEXT = {"type": "string"}
TYPES: dict[str, dict[str, object]] = {
    "terminal": {"command": TEXT, "text": TEXT, "lines": {"type": "integer"}, "x": {"type": ["string", "null"]}},
    "search": {"query": TEXT, "path": TEXT, "glob": {"type": "boolean"}},
    "read_file": {"path": TEXT, "lines": {}},
    "edit_file": {"path": TEXT, "text": TEXT},
}
PROSE = ("Ich prüfe es.\n\n", "日本語 🦉 ", "a < b and b <= c", " ", "\n", "if x[0]: {y}", "<b>", "</", "`[1]`")


def live(syntax: Syntax, opened: bool) -> LiveTurn:
    return LiveTurn(BYTES, syntax, TYPES, (STOP,), opened, lambda written: written)


def readings(syntax: Syntax, ids: Sequence[int], opened: bool, cuts: Sequence[int]) -> list[Settled]:
    turn = live(syntax, opened)
    return [turn.read(ids[:cut]) for cut in cuts]


def check(syntax: Syntax, whole: Completion, read: Sequence[Settled]) -> int:
    """Assert that every reading holds; the calls that grew and turned out to be malformed."""
    broken: set[int] = set()
    before = Settled()
    for each in read:
        assert whole.thinking.startswith(each.thinking)
        assert whole.texts[0].startswith(each.text)
        assert each.thinking.startswith(before.thinking) and each.text.startswith(before.text)
        for shown in each.calls:
            if whole.calls[shown.at].error:
                broken.add(shown.at)
                continue
            assert shown.name == whole.calls[shown.at].name
            assert arguments_json(whole.calls[shown.at].arguments).startswith(shown.arguments)
        before = each
    return len(broken)


@pytest.mark.parametrize("count", [12, pytest.param(600, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SYNTAXES)
def test_what_is_shown_of_any_text_holds(name: str, count: int) -> None:
    """Calls with every kind of value, broken in every way, in chunks of any size."""
    syntax, rng = SYNTAXES[name], random.Random(name)
    for _, made in completions(count, count, only=name):
        text = rng.choice(PROSE) + made[:1000].encode("utf-8", "replace").decode() + rng.choice(PROSE)
        opened = rng.random() < 0.3
        ids = BYTES.encode(text)
        cuts = sorted(rng.sample(range(len(ids) + 1), min(len(ids), 12)))
        check(syntax, syntax.read(text, TYPES, opened=opened), readings(syntax, ids, opened, cuts))


def turns(name: str, rng: random.Random) -> str:
    """A turn of this syntax as a trained policy writes it."""
    values = ("kit/core.py", "a\\nb", 'say \\"hi\\"', "ü 🦉", "</div> x</", "", "tab\\t1", "\\u00e9\\ud83e\\udd89")
    tools = (("terminal", "command"), ("search", "query"), ("edit_file", "text"))
    made: list[str] = []
    for _ in range(1 if name in ("llama3", "pythonic", "harmony") else rng.randrange(1, 4)):
        tool, key = rng.choice(tools)
        value = json.dumps(rng.choice(values) * rng.randrange(1, 4)) if name == "pythonic" else None
        made.append(call(name, tool, [(key, value or f'"{rng.choice(values) * rng.randrange(1, 4)}"')]))
    thought = rng.choice(("", "<think>\nHm, ü?\n</think>\n\n")) if name not in ("mistral", "harmony") else ""
    said = rng.choice(("", "I look.\n\n")) if name not in ("llama3", "pythonic", "harmony") else ""
    return thought + said + "\n".join(made)


@pytest.mark.parametrize("count", [6, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SYNTAXES)
def test_the_text_and_the_arguments_of_a_sound_turn_grow(name: str, count: int) -> None:
    syntax, rng = SYNTAXES[name], random.Random(name)
    grew = 0
    for _ in range(count):
        text = turns(name, rng)
        ids = [*BYTES.encode(text), STOP]
        read = readings(syntax, ids, False, range(len(ids) + 1))
        whole = syntax.read(text, TYPES)
        assert not any(call.error for call in whole.calls) and whole.calls, text
        assert check(syntax, whole, read) == 0
        assert read[-1].thinking == whole.thinking and read[-1].text == whole.texts[0]
        shown = {shown.arguments for each in read for shown in each.calls}
        grew += len(shown) > 2 * len(whole.calls)
    # A list of calls in Python is read as a whole.
    assert grew > count // 2 if name != "pythonic" else grew == 0


def test_a_character_is_shown_once_it_is_whole() -> None:
    ids = BYTES.encode("ü🦉.")
    read = readings(SYNTAXES["hermes"], ids, False, range(len(ids) + 1))
    assert [each.text for each in read] == ["", "", "ü", "ü", "ü", "ü", "ü🦉", "ü🦉."]


def test_calls_that_a_client_cannot_send_back_are_not_shown() -> None:
    def refuse(written: WrittenCall) -> WrittenCall:
        return msgspec.structs.replace(written, error="no")

    turn = LiveTurn(BYTES, SYNTAXES["hermes"], TYPES, (STOP,), False, refuse)
    assert not turn.read(BYTES.encode(call("hermes", "search", [("query", '"ls"')])[:-20])).calls
