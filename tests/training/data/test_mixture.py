"""Mixed data: shares follow the weights, what was killed resumes to the same bits, faults name file and line."""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import safetensors.torch
import torch

from headrace.config import Config, MidTraining, parse
from headrace.config.training import Data, Phase
from headrace.messages.rollout import RendererBundle
from headrace.rendering.tokenizer import Tokenizer
from headrace.training import mid_training
from headrace.training.data import opening
from headrace.training.data.base import DataError, Document
from headrace.training.data.index import permuted
from headrace.training.data.mixture import Mixture
from headrace.training.data.trajectories import RecordedSegment, tokenizer_hash
from tests.support.patience import PATIENCE_S
from tests.support.world import TOKENIZER, VOCAB, model

BUNDLE = RendererBundle(renderer="terse", tokenizer_json=TOKENIZER)
RECIPE = MidTraining(tokens=1500, batch_tokens=60, learning_rate=1e-2, processes=1, held_out=0.2, sequence=24)


def traces() -> Iterator[Document]:
    for start in itertools.count():
        yield Document(ids=[start % 7, *range(30, 40)], weights=[1.0] * 11)


def config(folder: Path, **changes: object) -> Config:
    """Three sources: code in files, texts in JSONL, own trajectories; and generated traces."""
    folder.mkdir(exist_ok=True)
    (folder / "code").mkdir(exist_ok=True)
    (folder / "code" / "a.py").write_text("def total(xs):\n    return sum(xs)\n" * 20)
    (folder / "code" / "b.py").write_text("some text to learn from\n")
    texts = [json.dumps({"text": f"some text {number} to learn from"}) for number in range(40)]
    (folder / "texts.jsonl").write_text("\n".join(texts) + "\n")
    segments = [
        RecordedSegment(
            ids=[number, 50, 51, 52], sampled=[(2, 4)], trajectory=f"t{number}", segment=0, task="s/1", reward=1.0,
            tokenizer=tokenizer_hash(TOKENIZER),
        )
        for number in range(30)
    ]  # fmt: skip
    (folder / "own.jsonl").write_bytes(b"".join(msgspec.json.encode(segment) + b"\n" for segment in segments))
    data = (
        Data(kind="text", path=str(folder / "code"), weight=2.0),
        Data(kind="text", path=str(folder / "texts.jsonl")),
        Data(kind="trajectories", path=str(folder / "own.jsonl")),
        Data(kind="generated"),
    )
    recipe = msgspec.structs.replace(RECIPE, data=data, **changes)
    return Config(mid_training=recipe)


def opened(folder: Path, **changes: object) -> Mixture:
    return opening.mixture(config(folder, **changes), BUNDLE, traces)


def test_shares_of_tokens_follow_the_weights_and_no_held_out_document_is_trained_on(tmp_path: Path) -> None:
    mixture = opened(tmp_path)
    taken = list(itertools.islice(mixture, 600))
    position = json.loads(mixture.position())["sources"]
    tokens = {name: at["tokens"] for name, at in position.items()}
    whole = sum(tokens.values())
    assert [share / whole for share in tokens.values()] == pytest.approx([0.4, 0.2, 0.2, 0.2], abs=0.03)
    assert max(len(document.ids) for document in taken) == RECIPE.sequence
    held = {tuple(document.ids) for documents in mixture.held_out().values() for document in documents}
    assert len(held) > 5 and not held & {tuple(document.ids) for document in taken}
    assert position["2:trajectories"]["epoch"] > 2, "several epochs"


def test_text_is_cut_into_sequences_that_predict_every_token_once(tmp_path: Path) -> None:
    tokenizer = Tokenizer.parse(TOKENIZER)
    text = "".join(f"line {number}\n" for number in range(50))
    (tmp_path / "a.txt").write_text(text)
    recipe = msgspec.structs.replace(
        RECIPE,
        held_out=0.0,
        data=(Data(kind="text", path=str(tmp_path / "a.txt"), epochs=1),),
        phases=(Phase(start=0.1, sequence=80, batch_tokens=200),),
    )
    parts = list(opening.mixture(Config(mid_training=recipe), BUNDLE, traces))
    assert sum((part.ids[1:] for part in parts), parts[0].ids[:1]) == tokenizer.encode(text)
    lengths = [len(part.ids) for part in parts]
    assert lengths[:7] == [24] * 7 and lengths[7] == 80, "the phase begins after a tenth of the tokens"


class Stop(Exception):
    pass


def test_what_was_stopped_anywhere_goes_on_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mid_training, "KEEP_S", 0.0)
    monkeypatch.setattr(mid_training, "KEEP_SHARE", math.inf)
    changes = {
        "phases": (Phase(start=0.4, sequence=60, batch_tokens=120),),
        "evaluate_every": 6,
        "tokens": 600,
        "evaluate_tokens": 60,
    }
    recipe, checkpoint_file = config(tmp_path, **changes).mid_training, tmp_path / "kept"
    whole, seen = model(), list[mid_training.Progress]()
    steps = mid_training.run(whole, opened(tmp_path, **changes), recipe, seen.append)
    assert seen[-1].held_out.keys() == {"1:text", "2:trajectories"}
    assert seen[-1].held_out["1:text"] < next(iter(seen)).held_out["1:text"]
    for pieces in (10, 24):
        left = itertools.count(pieces, -1)

        def between(left: Iterator[int] = left) -> None:
            if next(left) == 0:
                raise Stop

        mixture = opening.mixture(config(tmp_path, **changes), BUNDLE, traces, between)
        with pytest.raises(Stop):
            mid_training.run(model(), mixture, recipe, file=checkpoint_file)
    again = model(seed=9)
    first = list[mid_training.Progress]()
    assert (
        mid_training.run(again, opened(tmp_path, **changes), recipe, first.append, every=1, file=checkpoint_file)
        == steps
    )
    assert first[0].step > 3, "it did not begin again"
    assert all(torch.equal(value, again.state()[name]) for name, value in whole.state().items())


def test_changed_data_is_refused_when_it_is_continued(tmp_path: Path) -> None:
    position = opened(tmp_path).position()
    settings = config(tmp_path)
    (tmp_path / "texts.jsonl").write_text('{"text": "another"}\n')
    with pytest.raises(DataError, match="1:text: its content has changed"):
        opening.mixture(settings, BUNDLE, traces).seek(position)


@pytest.mark.parametrize(
    ("name", "kind", "content", "words"),
    [
        ("a.jsonl", "text", b'{"text": "x"}\n\n{"text": 3}\n', r"a\.jsonl, line 3: expected `str`, got `int`"),
        ("a.jsonl", "text", b'{"text": "x"}\n{"text"\n', r"a\.jsonl, line 2: expected JSON, got"),
        ("a.txt", "text", b"one\ntwo \xff\n", r"a\.txt, line 1: expected UTF-8, got byte 0xff"),
        ("a.jsonl", "trajectories", b"{}\n", r"a\.jsonl, line 1: object missing required field"),
        ("a.jsonl", "chat", b"{}\n", r"expected a policy with a chat template, got the format 'terse'"),
        ("b.jsonl", "text", None, r"b\.jsonl: expected a file or a folder, got neither"),
    ],
)
def test_a_fault_names_file_line_and_what_was_expected(
    tmp_path: Path, name: str, kind: str, content: bytes | None, words: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    text = f'[[mid_training.data]]\nkind = "{kind}"\npath = "{tmp_path / name}"\n'
    with pytest.raises(DataError, match=words):
        opening.mixture(parse(text), BUNDLE, traces)


def test_a_large_file_is_cut_into_documents_and_is_never_read_whole(tmp_path: Path) -> None:
    line = "é" * 100 + "\n"
    (tmp_path / "a.txt").write_text(line * 5000 + "é" * 400_000)
    reader = opening.open_text(BUNDLE)
    with (tmp_path / "a.txt").open("rb") as file:
        parts = []
        while (document := reader.next(file, tmp_path / "a.txt", 1)) is not None:
            parts.append(document[0])
    assert len(parts) >= 4 and max(map(len, parts)) < 600_000
    assert b"".join(parts).decode() == "".join(part.decode() for part in parts) == (tmp_path / "a.txt").read_text()


@pytest.mark.parametrize("count", [1, 2, 5, 64, 1000])
def test_an_epoch_reads_every_document_once(count: int) -> None:
    order = [permuted(place, count, "a/0") for place in range(count)]
    assert sorted(order) == list(range(count))
    assert count < 64 or order != [permuted(place, count, "a/1") for place in range(count)]


SCRIPT = """
import sys
from headrace.training import mid_training
mid_training.KEEP_S, mid_training.KEEP_SHARE = 0.0, float("inf")
from headrace.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [{}, {"lora": {"rank": 2}}, {"ranks": 2}])
def test_a_killed_command_resumes_and_writes_the_same_folder(tmp_path: Path, trainer: dict[str, object]) -> None:
    """`headrace policy train`, with kill -9 twice; the checkpoints are written after every step."""
    made = config(tmp_path)
    recipe = msgspec.structs.replace(made.mid_training, tokens=6000)
    policy = {"dim": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "experts": 4, "top_k": 2,
              "expert_dim": 32, "vocab": VOCAB + 60}  # fmt: skip
    data = [source for source in recipe.data if source.kind != "trajectories"]  # those of another tokenizer
    recipe = msgspec.structs.replace(recipe, data=tuple(data))
    file = tmp_path / "config.json"
    file.write_bytes(msgspec.json.encode({"policy": policy, "mid_training": recipe, "trainer": trainer}))

    def start(folder: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-c", SCRIPT, "policy", "train", str(file), str(tmp_path / folder)]
        return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE)

    whole = start("whole")
    _, said = whole.communicate(timeout=PATIENCE_S)
    assert whole.returncode == 0, said
    checkpoint_file = tmp_path / "killed.training" / "checkpoints" / "mid-training.safetensors"
    for _ in range(2):
        before = checkpoint_file.stat().st_mtime_ns if checkpoint_file.exists() else 0
        process = start("killed")
        deadline = time.monotonic() + PATIENCE_S
        while not checkpoint_file.exists() or checkpoint_file.stat().st_mtime_ns == before:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline, f"no new {checkpoint_file} within {PATIENCE_S} s"
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=PATIENCE_S)
    last = start("killed")
    _, said = last.communicate(timeout=PATIENCE_S)
    assert last.returncode == 0, said
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert "mid-training.jsonl" in names and "model.safetensors" in names
    assert not any("lora" in name for name in safetensors.torch.load_file(tmp_path / "whole" / "model.safetensors"))
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes(), name
    assert not (tmp_path / "killed.training").exists()
