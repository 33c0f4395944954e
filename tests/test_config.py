"""A bad configuration names the key, what was expected, and the line."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from headrace.cli import main
from headrace.config import Config, ConfigError, load, parse
from headrace.config.base import WORDS
from headrace.config.reading import INSTEAD, keys
from tests.support.paths import ROOT

DEPLOY = ROOT / "deploy"


def test_defaults_are_a_whole_configuration() -> None:
    config = parse("")
    assert config == Config()
    assert config.curriculum.group_size >= 2
    assert msgspec.json.decode(msgspec.json.encode(config), type=Config) == config, "every default is in its range"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[run]\nseed = 1\n\n[bus]\nurll = 'x'\n", ["line 5", "bus.urll", "unknown key", "url"]),
        ("[run]\nseed = 'a'\n", ["line 2", "run.seed", "expected `int`, got `str`"]),
        ("[nope]\n", ["line 1", "nope", "unknown key"]),
        (
            "[curriculum]\non_stale = 'maybe'\n",
            ["line 2", "curriculum.on_stale", "expected 'wait' or 'drop', got 'maybe'"],
        ),
        ("[run\n", ["not valid TOML", "line 1"]),
        ("[tasks]\nsuite = 'client'\n[production]\nenabled = false", ["tasks.suite", "gateway"]),
        ("[tasks]\nsuite = 'client'\n[production]\nenabled = true\n[feedback]\nenabled = true", ["feedback.enabled"]),
    ],
)
def test_mistakes_are_named(text: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "x.toml")
    for part in ["x.toml", *parts]:
        assert part in str(caught.value)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file; start from deploy/demo\.toml"):
        load(tmp_path / "none.toml")


def test_overrides_win_and_are_checked() -> None:
    config = parse("[run]\nseed = 1\n", overrides=["run.seed=7", "environment.backend=process"])
    assert (config.run.seed, config.environment.backend) == (7, "process")
    with pytest.raises(ConfigError, match="section"):
        parse("", overrides=["seed=7"])
    with pytest.raises(ConfigError, match=r"run\.sed"):
        parse("", overrides=["run.sed=7"])


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("*.toml")), ids=lambda path: path.name)
def test_every_shipped_configuration_is_valid(path: Path) -> None:
    assert isinstance(load(path), Config)


WRONG = (
    *("0", "-1", "1", "99999999999999999999", "1e300", "-1e-300", "nan", "inf", "-inf", "true", "2026-11-22"),
    *("''", "' '", "'../../x'", "'a/b'", "'Has Space'", "'\\u0000'", "'nats://'", "'x'", f"'{'a' * 5000}'"),
    *("[]", "['']", "[[]]", "[['']]", "[0]", "{}", "{x = 1}", "[" * 40 + "]" * 40),
)
"""TOML values that are wrong for most keys: too small, too large, not finite, empty, of another type."""
KEYS = [(section, key, default) for section, key, _, default in keys()]


@pytest.mark.parametrize("key", INSTEAD)
def test_a_key_that_the_mesh_replaced_names_the_line_to_write(key: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(INSTEAD[key])):
        parse("", overrides=[f"{key}=2"])


def test_every_key_with_every_wrong_value_is_one_sentence_or_a_configuration() -> None:
    refused, accepted = 0, 0
    for section, key, _ in KEYS:
        for value in WRONG:
            for text, overrides in ((f"[{section}]\n{key} = {value}\n", ()), ("", (f"{section}.{key}={value}",))):
                try:
                    parse(text, "x.toml", overrides)
                    accepted += 1
                except ConfigError as error:
                    refused += 1
                    line = str(error)
                    assert "\n" not in line and len(line) < 1000, line
                    assert line.startswith(("--set ", "x.toml")) and ": " in line, line
                    assert any(word in line for word in ("expected", "every range", "unknown key")), line
    assert refused > 10 * accepted > 0, (refused, accepted)


@pytest.mark.parametrize(("section", "key", "default"), KEYS, ids=[f"{section}.{key}" for section, key, _ in KEYS])
def test_every_key_refuses_something(section: str, key: str, default: Any) -> None:
    for value in ("nan", "[[[]]]", "{x = [[nan]]}"):
        with pytest.raises(ConfigError, match=rf"x\.toml, line 2: {section}\.{key}"):
            parse(f"[{section}]\n{key} = {value}\n", "x.toml")


OWNED = ("template_kwargs", "options")
"""Tables whose keys and values belong to the user's own template or plugins."""


def open_ended(kind: inspect.Type) -> list[str]:
    """The parts of a type that take any number or any text."""
    match kind:
        case inspect.IntType() | inspect.FloatType():
            above = kind.ge is not None or kind.gt is not None
            below = kind.le is not None or kind.lt is not None
            return [] if above and below else [f"a number without {'an upper' if above else 'a lower'} limit"]
        case inspect.StrType(max_length=longest, pattern=pattern):
            return [] if longest is not None or pattern is not None else ["text of any length"]
        case inspect.StructType(fields=fields):
            fields = tuple(field for field in fields if field.name not in OWNED)
            return [f"{field.name}: {part}" for field in fields for part in open_ended(field.type)]
        case inspect.UnionType(types=types):
            return [part for each in types for part in open_ended(each)]
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
            return open_ended(item)
        case inspect.TupleType(item_types=items):
            return [part for each in items for part in open_ended(each)]
        case inspect.DictType(key_type=key, value_type=value):
            return open_ended(key) + open_ended(value)
        case inspect.BoolType() | inspect.LiteralType() | inspect.NoneType():
            return []
    raise TypeError(kind)


def test_every_key_has_a_range() -> None:
    """A key that loses its range would take what no code expects, and the values above might not show it."""
    config = inspect.type_info(Config)
    assert isinstance(config, inspect.StructType)
    assert {section.name: parts for section in config.fields if (parts := open_ended(section.type))} == {}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["limits.max_turn_tokens=400"], "limits.max_turn_tokens: expected at most limits.max_tokens"),
        (["limits.max_turn_tokens=200", "limits.context_tokens=100"], "less than limits.context_tokens"),
        (["limits.reserve_tokens=90"], "limits.reserve_tokens: expected 0, or more than 96"),
        (["algorithm.minibatches=1000"], "algorithm.minibatches: expected at most the 64 trajectories"),
        (["algorithm.ratio_low=1.5"], "algorithm.ratio_low"),
        (["algorithm.dual_clip=3.0"], "algorithm.dual_clip: expected 0 with weighting = 'truncated'"),
        (["algorithm.weighting=clipped", "algorithm.dual_clip=1.2"], "algorithm.dual_clip: expected 0 or more than"),
        (["policy.kv_heads=2"], "policy.kv_heads: expected a divisor of heads"),
        (["policy.top_k=9"], "policy.top_k: expected at most experts"),
        (["policy.head_dim=31"], "policy.head_dim: expected an even number"),
        (
            ["trainer.mesh.shard=2", "trainer.mesh.expert=2", "trainer.offload=optimizer"],
            "trainer.offload: expected none",
        ),
        (["trainer.mesh.shard=4", "trainer.node_ranks=3"], "trainer.node_ranks: expected a divisor"),
        (["trainer.mesh.shard=2", "trainer.node_ranks=1"], "trainer.rendezvous: expected HOST:PORT"),
        (["trainer.rendezvous=node0"], "trainer.rendezvous: expected HOST:PORT, or nothing, got 'node0'"),
        (
            ["trainer.mesh.shard=2", "trainer.mesh.replicate=2", "trainer.mesh.expert=4"],
            "trainer.mesh.expert: expected a divisor of trainer.mesh.shard",
        ),
        (["algorithm.moments=eight_bit", "algorithm.beta2=0.995"], "algorithm.beta2: expected at most 0.99"),
        (
            ["algorithm.moments=eight_bit", "trainer.mesh.shard=2", "mid_training.beta2=0.995"],
            "mid_training.beta2: expected at most 0.99",
        ),
        (["environment.max_vms=2"], "environment.max_vms: expected more than judge_share"),
        (["environment.warm=9"], "environment.warm: expected at most max_vms"),
        (["sandboxes.memory_mib=63"], "sandboxes.memory_mib: expected 0 or at least 64, got 63"),
        (["weights.collect_chains=1"], "weights.collect_chains: expected 0 or at least 2"),
        (["processes.groups=[[]]"], "processes.groups: expected at least one actor"),
        (["processes.groups=[['rollout:a', 'rollout:a']]"], "processes.groups: expected every name:id once"),
    ],
)
def test_keys_that_contradict_each_other_are_named(changes: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse("", "x.toml", changes)


def test_every_pattern_has_words() -> None:
    with pytest.raises(ConfigError, match="lower-case letters, digits"):
        parse("[run]\nid = '../../x'\n")
    assert all(words and "regex" not in words for words in WORDS.values())


@pytest.mark.parametrize("change", ["curriculum.group_size=0", "run.id=../../x", "bus.port=99999", "limits.wall_s=nan"])
def test_a_wrong_key_is_one_line_and_exit_code_2(change: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["up", str(DEPLOY / "demo.toml"), "--set", change]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and change.partition("=")[0] in said.err and "Traceback" not in said.err
