"""The request of `headrace init`, and the refusals of requests that no part of headrace serves yet."""

import re
from pathlib import Path
from typing import NamedTuple

from headrace.errors import WRONG_INPUT, HeadraceError


class InitError(HeadraceError, exit_status=WRONG_INPUT):
    """A run cannot be written for this model, suite or hardware; the text is one sentence."""


class Wanted(NamedTuple):
    """A run to write."""

    model: str
    suite: str
    gpus: int
    """Of each node."""
    gib: float
    """Memory of each GPU."""
    nodes: int = 1
    engine: str = ""
    """Empty: the embedded one on one GPU, SGLang on more."""
    context: int = 0
    """Tokens; 0: 32,768, or what the model has."""
    python: str = "/opt/sglang/bin/python"
    """The interpreter of SGLang's environment."""
    tasks_dir: str = "suites"


def gpus_of(text: str) -> tuple[int, float]:
    """``8x80``: GPUs of a node, and GiB of each. InitError."""
    match = re.fullmatch(r"([1-9]\d{0,2})x([1-9]\d{0,3}(?:\.\d+)?)", text)
    if not match:
        raise InitError(f"--gpus: expected COUNTxGIB, such as 8x80 for eight GPUs of 80 GiB, got {text!r}")
    return int(match[1]), float(match[2])


def refuse(wanted: Wanted, agent: str) -> None:
    """Refuse what no part of headrace does. InitError."""
    if agent != "headrace":
        raise InitError(
            f"--agent {agent}: an agent of your own is a client of the gateway (docs/clients.md), and its sessions do "
            "not yet form the groups of a suite's tasks; leave --agent out"
        )
    if wanted.engine not in ("", "embedded", "sglang"):
        raise InitError(f"--engine {wanted.engine}: expected embedded or sglang; init writes no other engine yet")
    if wanted.nodes > 2:
        raise InitError(
            f"--nodes {wanted.nodes}: init places the trainer on one node and the samplers on a second; a third gets "
            "rollout actors by its own units of `headrace deploy systemd` (docs/deploying.md)"
        )
    if wanted.engine == "embedded" and wanted.gpus * wanted.nodes > 1:
        raise InitError(
            "--engine embedded: one process samples on one GPU, so the others would idle: expected --gpus 1x..., or "
            "--engine sglang"
        )
    if wanted.engine == "sglang" and wanted.gpus * wanted.nodes == 1:
        raise InitError(
            "--engine sglang: a server and a trainer do not share a GPU yet; expected --gpus of at least 2x..., or "
            "--engine embedded"
        )
    if not (Path(wanted.model) / "config.json").is_file():
        raise InitError(f"--model: {wanted.model}/config.json is not there; expected a Hugging Face folder")
