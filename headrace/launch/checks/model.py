"""Whether the checkpoint can be trained and has its files, and whether the engine's requirements are met."""

import json
from collections.abc import Iterator
from pathlib import Path

from headrace.config import Config, ConfigError, Engine
from headrace.engines import registry as engines
from headrace.launch.checks import protection
from headrace.launch.checks.finding import Finding, bad, good
from headrace.registry import PluginError


def check(config: Config) -> Iterator[Finding]:
    """Findings about [policy], for the trainer's host. The files of a checkpoint that has no other problem are
    compared with the policy's shape, which imports torch."""
    if not config.policy.checkpoint:
        yield good("policy", "a policy and a tokenizer are made from the section's sizes")
        return
    findings = list(_checkpoint(config))
    yield from findings
    if all(finding.good for finding in findings):
        yield from _weights(config)


def engine(section: Engine) -> Iterator[Finding]:
    """Findings about [engine], for a host with a rollout actor."""
    try:
        for key, text in engines.problems(section):
            yield bad(f"engine.{key}", text)
        for need in engines.requirements(section):
            yield Finding(f"engine.{need.key}", need.met, need.text)
    except PluginError as error:
        yield bad("engine.kind", str(error))


def refuse(config: Config) -> None:
    """Refuse an unknown engine, a section that the engine cannot use, and a checkpoint that cannot be trained, before a
    run starts. ConfigError."""
    try:
        for key, text in engines.problems(config.engine):
            raise ConfigError(f"engine.{key}: {text}")
    except PluginError as error:
        raise ConfigError(f"engine.kind: {error}") from None
    for finding in _checkpoint(config) if config.policy.checkpoint else ():
        if not finding.good:
            raise ConfigError(f"{finding.part}: {finding.text}")


def _weights(config: Config) -> Iterator[Finding]:
    from headrace.policy.config import CheckpointError
    from headrace.policy.layout import hugging_face, refusing

    try:
        refusing.refuse(hugging_face.from_section(config.policy), Path(config.policy.checkpoint))
    except CheckpointError as error:
        yield bad("policy.checkpoint", f"{error}; copy the files of the original model again")


def _checkpoint(config: Config) -> Iterator[Finding]:
    from headrace.policy.config import CheckpointError
    from headrace.policy.layout import hugging_face
    from headrace.rendering.base import RendererError
    from headrace.rendering.bundle import checkpoint_bundle
    from headrace.rendering.tokenizer import Tokenizer

    section = config.policy
    folder, key = Path(section.checkpoint), "policy.checkpoint"
    try:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    except OSError as error:
        if (folder / "adapter_config.json").is_file():
            yield bad(key, f"{folder} is an adapter: `headrace policy from-lora {folder} DIR` makes a checkpoint of it")
            return
        yield bad(key, f"{folder}/config.json cannot be read ({error.strerror}); expected a Hugging Face folder")
        return
    except (ValueError, KeyError, TypeError):
        yield bad(key, f"{folder}/config.json is not JSON with a model_type; export the checkpoint again")
        return
    try:
        hugging_face.from_section(section)
    except CheckpointError as error:
        yield bad(key, f"{folder}: {error}; choose a checkpoint whose architecture is supported (docs/models.md)")
        return
    try:
        policy = hugging_face.of_run(config)
    except CheckpointError as error:  # names the key and its supported value
        yield bad(key, str(error))
        return
    if not any(folder.glob("*.safetensors")):
        yield bad(key, f"{folder} has no *.safetensors file; convert its weights to safetensors")
        return
    yield from protection.check(config, policy)
    try:
        bundle = checkpoint_bundle(
            folder, section.renderer, section.chat_template, section.template_kwargs, system=section.system
        )
    except (RendererError, PluginError, ValueError, OSError) as error:
        yield bad(key, f"{error}; copy tokenizer and chat template from the original model")
        return
    added = (token["id"] for token in json.loads(bundle.tokenizer_json).get("added_tokens", ()))
    largest = max(len(Tokenizer.parse(bundle.tokenizer_json)), 1 + max(added, default=-1))
    if largest > policy.vocab:
        yield bad(
            key,
            f"{folder}/tokenizer.json has ids up to {largest - 1} and config.json a vocab_size of {policy.vocab}: "
            "copy both files from one model",
        )
    elif beyond := [id for id in bundle.eos_ids if id >= policy.vocab]:
        yield bad(
            key,
            f"the stop id {beyond[0]} is not below vocab_size {policy.vocab}: correct eos_token_id of {folder}/"
            "generation_config.json and config.json",
        )
    else:
        yield good(key, f"{kind} with the renderer {bundle.renderer}")
