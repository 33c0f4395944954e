"""The harnesses that headrace knows, and the words and variables with which each starts in a sandbox.

None needs a file of settings: all of it is arguments and variables, so nothing is written into the workspace.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headrace.config import Config, Program

OWN = "own"
QUIET = {"HOME": "{home}", "XDG_CONFIG_HOME": "{home}/.config", "XDG_DATA_HOME": "{home}/.local/share"}
"""Every harness keeps its own files in a home that ends with the attempt."""
OPENAI = {"OPENAI_API_KEY": "{key}", "OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_BASE": "{url}/v1"}
ANTHROPIC = {"ANTHROPIC_API_KEY": "{key}", "ANTHROPIC_BASE_URL": "{url}"}
DIALECTS: dict[str, Mapping[str, str]] = {"chat": OPENAI, "responses": OPENAI, "messages": ANTHROPIC}

OPENCODE = (
    '{"provider": {"headrace": {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": "{url}/v1", '
    '"apiKey": "{key}"}, "models": {"latest": {}}}}, "model": "headrace/latest", "small_model": "headrace/latest", '
    '"autoupdate": false, "share": "disabled"}'
)
CODEX = (
    'model="latest"',
    'model_provider="headrace"',
    'model_providers.headrace.name="headrace"',
    'model_providers.headrace.base_url="{url}/v1"',
    'model_providers.headrace.env_key="HEADRACE_KEY"',
    'model_providers.headrace.wire_api="responses"',
)

KNOWN = {
    "mini-swe-agent": Program(
        install="pip:mini-swe-agent==2.4.6 litellm==1.106.2 mcp==2.3.0",
        command=("python", "-m", "minisweagent", "-m", "openai/latest", "-y", "--exit-immediately", "-t", "{prompt}"),
        environment={
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_GLOBAL_CONFIG_DIR": "{home}",
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        version="2.4.6",
    ),
    "codex": Program(
        install="npm:@openai/codex@0.171.0",
        command=(
            *("codex", "exec", "--skip-git-repo-check"),
            "--dangerously-bypass-approvals-and-sandbox",
            *(word for setting in CODEX for word in ("-c", setting)),
            "{prompt}",
        ),
        dialect="responses",
        environment={"HEADRACE_KEY": "{key}", "CODEX_HOME": "{home}"},
        version="0.171.0",
    ),
    "claude-code": Program(
        install="npm:@anthropic-ai/claude-code@2.1.332",
        command=("claude", "-p", "{prompt}", "--model", "latest", "--allowedTools", "Bash,Edit,Write,Read"),
        dialect="messages",
        environment={"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"},
        version="2.1.332",
    ),
    "opencode": Program(
        install="npm:opencode-ai@1.18.33",
        command=("opencode", "run", "-m", "headrace/latest", "{prompt}"),
        environment={"OPENCODE_CONFIG_CONTENT": OPENCODE, "OPENCODE_DISABLE_AUTOUPDATE": "true"},
        version="1.18.33",
    ),
}


class Started(NamedTuple):
    """A harness's command in one sandbox."""

    argv: tuple[str, ...]
    env: dict[str, str]


def programs(config: Config) -> dict[str, Program]:
    """All harnesses of a configuration by name."""
    return {**KNOWN, **config.harnesses}


def wanted(config: Config) -> tuple[str, ...]:
    """The harnesses that a run uses, besides headrace's own agent."""
    names = config.harness.mix or {config.harness.name: 1}
    return tuple(name for name in names if name != OWN)


def of_group(mix: Sequence[tuple[str, int]], group: str) -> str:
    """The harness of a group: a function of its name, so that a successor chooses the same one. mix: names and
    weights."""
    place = int.from_bytes(hashlib.sha256(f"harness {group}".encode()).digest()[:8]) % sum(weight for _, weight in mix)
    for name, weight in mix:
        if place < weight:
            return name
        place -= weight
    raise AssertionError


def started(
    program: Program, runners: Mapping[str, Sequence[str]], arguments: Sequence[str], values: Mapping[str, str]
) -> Started:
    """The command and its variables. runners: the words that start each program of the bundle. values: of the
    replacements; the prompt is a word of its own."""

    def filled(text: str) -> str:
        for name, value in values.items():
            text = text.replace(f"{{{name}}}", value) if name != "prompt" else text
        return text

    first, *rest = program.command
    words = (*runners.get(first, (first,)), *rest, *arguments)
    argv = tuple(values["prompt"] if word == "{prompt}" else filled(word) for word in words)
    env = {**QUIET, **DIALECTS[program.dialect], **program.environment}
    return Started(argv, {name: filled(value) for name, value in env.items()})
