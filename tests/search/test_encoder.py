"""The embedding model in plain torch, against transformers on a tiny model; the packaged weights, where installed."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from headrace.search import models
from headrace.search.encoder import Encoder
from headrace.search.models import INSTALL, SearchModelError, find, read
from tests.support import embedding_model

TEXTS = ["def add(a, b): return a + b", "send mail to a user", "x", "return a + b " * 30, "the sum of two numbers"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedding_model.write(tmp_path_factory.mktemp("tiny-bert"), TEXTS)


@pytest.mark.slow
def test_vectors_equal_those_of_transformers_but_for_int8(tiny: Path) -> None:
    BertModel = pytest.importorskip("transformers", reason="pip install -e '.[dev]'").BertModel
    reference, tokenizer = BertModel.from_pretrained(tiny).eval(), Tokenizer.from_file(str(tiny / "tokenizer.json"))
    got = Encoder(tiny, 40).embed(TEXTS)
    for text, vector in zip(TEXTS, got, strict=True):
        all_ids = tokenizer.encode(text).ids
        ids = torch.tensor([all_ids if len(all_ids) <= 40 else [*all_ids[:39], 3]])
        with torch.no_grad():
            mean = reference(ids).last_hidden_state[0].mean(0)
        wanted = torch.nn.functional.normalize(mean, dim=0).numpy()
        assert float((wanted * vector).sum()) > 0.999


def test_a_vector_does_not_depend_on_the_texts_beside_it(tiny: Path) -> None:
    encoder = Encoder(tiny, 40)
    together = encoder.embed(TEXTS * 3)
    assert np.array_equal(together[:5], together[5:10])
    for at, text in enumerate(TEXTS):
        assert np.array_equal(encoder.embed([text])[0], together[at])


def test_a_folder_that_is_no_model_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(SearchModelError, match=r"lacks config\.json, tokenizer\.json, model\.saf.*: expected a folder"):
        find(str(tmp_path))
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_bytes((tiny / name).read_bytes())
    assert read(tmp_path) == models.SearchModel(tmp_path, read(tiny).sha256, 64)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "roberta"}))
    with pytest.raises(SearchModelError, match="expected model_type bert"):
        Encoder(tmp_path, 40)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    with pytest.raises(SearchModelError, match="expected mean pooling"):
        read(tmp_path)
    assert find("none") is None


def test_packaged_weights_with_another_hash_are_refused(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "packaged", lambda: tiny)
    with pytest.raises(SearchModelError, match=r"has sha256 .* instead of 53aa51172d14: reinstall it"):
        find("auto")
    monkeypatch.setattr(models, "packaged", lambda: None)
    assert find("auto") is None and not models.installed("auto")


@pytest.mark.skipif(models.packaged() is None, reason=f"the packaged weights are not installed ({INSTALL})")
def test_the_packaged_weights_find_code_by_its_meaning() -> None:
    model = find("auto")
    assert model is not None and model.width == 384
    encoder = Encoder(model.folder, 64)
    codes = [
        "shop.py total\ndef total(cart):\n    return sum(item.price for item in cart)",
        "net.py retry\ndef retry(call, times):\n    for _ in range(times):\n        call()",
        "text.py slug\ndef slug(title):\n    return title.lower().replace(' ', '-')",
    ]
    vectors = encoder.embed(codes, batch=len(codes))
    for wanted, query in enumerate(("how much does everything cost", "try again after a failure", "make a URL part")):
        near = vectors @ encoder.embed([query], batch=1)[0]
        assert int(near.argmax()) == wanted
