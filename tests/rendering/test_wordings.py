"""Other words for tools: one set per seed, a held-out set that training never shows, records with the tools' names."""

import pytest

from headrace.harness.tools.registry import TOOLS, schemas_of
from headrace.messages.rollout import ToolWording
from headrace.rendering import schemas, wordings
from headrace.rendering.base import RendererError
from headrace.rendering.bundle import terse_bundle
from headrace.rendering.registry import Renderers
from headrace.rendering.tokenizer import Tokenizer
from tests.support import chat_formats

BUILT_IN = schemas_of(tuple(name for name in TOOLS.names() if TOOLS.builtin(name)))


def words_of(words: str, seeds: range) -> set[str]:
    shown_words: set[str] = set()
    for seed in seeds:
        for tool in wordings.worded(BUILT_IN, ToolWording(words=words, seed=seed)):  # type: ignore[arg-type]
            shown_words |= {tool.schema.name, tool.schema.about, *(p.about for p in tool.schema.parameters.values())}
            shown_words |= {f"{tool.own}({name})" for name in tool.schema.parameters}
    return shown_words - {"finish"}


def test_every_built_in_tool_has_words_that_name_one_tool_and_one_argument() -> None:
    assert {tool.name for tool in BUILT_IN} == set(wordings.TABLE)
    names = [name for standard, words in wordings.TABLE.items() for name in {standard, *words.names}]
    assert len(names) == len(set(names))
    for tool in BUILT_IN:
        columns = wordings.TABLE[tool.name].arguments
        assert set(columns) == set(tool.parameters)
        arguments = [each.split(": ")[0] for standard, column in columns.items() for each in (f"{standard}: ", *column)]
        assert len(arguments) == len(set(arguments)), tool.name


def test_training_never_shows_the_held_out_words() -> None:
    trained, held = words_of("train", range(200)), words_of("heldout", range(3))
    assert not trained & held
    assert len(held) == len(words_of("heldout", range(1))), "the held-out words are one set; the seed gives their order"
    builtin_names = {tool.name for tool in BUILT_IN} - {"finish"}
    assert builtin_names < trained and not builtin_names & held


def test_one_seed_gives_one_set_and_other_seeds_others() -> None:
    wording = ToolWording(words="train", seed=5)
    assert wordings.worded(BUILT_IN, wording) == wordings.worded(BUILT_IN, wording)
    sets = {
        tuple(tool.schema for tool in wordings.worded(BUILT_IN, ToolWording(words="train", seed=n))) for n in range(20)
    }
    assert len(sets) == 20
    few = {tool.own: tool for tool in wordings.worded(BUILT_IN[3:6], wording)}
    assert all(few[tool.own] == tool for tool in wordings.worded(BUILT_IN, wording) if tool.own in few)


def test_a_node_with_other_words_and_a_format_without_tools_are_refused() -> None:
    wording = ToolWording(words="train", seed=5)
    terse = terse_bundle(Tokenizer.train((), 400).dump())
    with pytest.raises(RendererError, match="chat template"):
        Renderers(terse).open(BUILT_IN, wording)
    bundle = chat_formats.bundle("hermes", tools=schemas.functions_json())
    with pytest.raises(RendererError, match="words for tools differ"):
        Renderers(bundle).open(BUILT_IN[:3], wording)
