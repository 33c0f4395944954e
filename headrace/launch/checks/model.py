"""Whether the checkpoint has its files and a usable tokenizer, and whether SGLang has a supported version."""

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from headrace.config import Config, Engine, Policy
from headrace.engines.registry import ENGINES
from headrace.engines.sglang.versions import VERSIONS
from headrace.launch.checks.finding import Finding, bad, good
from headrace.registry import PluginError

ANSWER_S = 1.0


def check(config: Config) -> Iterator[Finding]:
    """Findings about [policy] and [engine]."""
    if config.policy.checkpoint:
        yield from _checkpoint(config.policy)
    else:
        yield good("policy", "a policy and a tokenizer are made from the section's sizes")
    try:
        ENGINES.get(config.engine.kind)
    except PluginError as error:
        yield bad("engine.kind", str(error))
    if config.engine.kind == "sglang":
        yield _installed(config.engine) if config.engine.python else _running(config.engine)
        stage = Path(config.engine.stage_dir)
        if not stage.is_dir():
            yield bad("engine.stage_dir", f"there is no folder {stage}; create it, or set another engine.stage_dir")


def _checkpoint(section: Policy) -> Iterator[Finding]:
    from headrace.rendering.base import RendererError
    from headrace.rendering.bundle import checkpoint_bundle

    folder, key = Path(section.checkpoint), "policy.checkpoint"
    try:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    except OSError as error:
        yield bad(key, f"{folder}/config.json cannot be read ({error.strerror}); expected a Hugging Face folder")
        return
    except (ValueError, KeyError, TypeError):
        yield bad(key, f"{folder}/config.json is not JSON with a model_type; export the checkpoint again")
        return
    if not any(folder.glob("*.safetensors")):
        yield bad(key, f"{folder} has no *.safetensors file; convert its weights to safetensors")
        return
    try:
        bundle = checkpoint_bundle(
            folder, section.renderer, section.chat_template, section.template_kwargs, system=section.system
        )
    except (RendererError, PluginError, ValueError, OSError) as error:
        yield bad(key, f"{error}; copy tokenizer and chat template from the original model")
        return
    yield good(key, f"{kind} with the renderer {bundle.renderer}")


def _installed(section: Engine) -> Finding:
    question = "from importlib.metadata import version; print(version('sglang'))"
    try:
        done = subprocess.run(
            [section.python, "-c", question], capture_output=True, text=True, timeout=10 * ANSWER_S, check=False
        )
    except OSError as error:
        return bad("engine.python", f"{section.python} cannot be started ({error.strerror}); run `make test-sglang`")
    except subprocess.TimeoutExpired:
        return bad("engine.python", f"{section.python} did not answer; expected a Python interpreter")
    if done.returncode:
        return bad("engine.python", f"{section.python} has no package sglang; install it (docs/sglang.md)")
    return _version("engine.python", done.stdout.strip())


def _running(section: Engine) -> Finding:
    try:
        with urllib.request.urlopen(f"{section.url.rstrip('/')}/server_info", timeout=ANSWER_S) as reply:
            found = str(json.load(reply).get("version", "unknown"))
    except (OSError, ValueError, AttributeError) as error:
        return bad("engine.url", f"{section.url}/server_info does not answer ({error}); start the SGLang server")
    return _version("engine.url", found)


def _version(key: str, found: str) -> Finding:
    if found not in VERSIONS:
        return bad(key, f"expected SGLang {' or '.join(VERSIONS)}, got {found}; install deploy/sglang/requirements.txt")
    return good(key, f"SGLang {found}")
