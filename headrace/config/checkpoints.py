"""Defaults of a run that begins with a checkpoint. A new policy's would overwrite its weights and cut its context.

Limits follow from the model's positions: a context ends at its limit, the turn that reaches it and a summary.
"""

import json
from pathlib import Path
from typing import Any

RATE = 1e-6
"""Of published recipes for models of 4 to 30 billion parameters."""
POSITIONS = 32_768
"""Of a model whose config.json names none, or is not on this machine."""
CONTEXT, TURN = 32_768, 4096
"""Most tokens of a context and of a turn that no key sets."""


def protect(raw: dict[str, Any]) -> None:
    """Set the keys that a configuration with `policy.checkpoint` leaves out. raw: sections and keys as TOML has
    them."""
    section = raw.get("policy")
    folder = section.get("checkpoint") if isinstance(section, dict) else None
    if not isinstance(folder, str) or not folder:
        return
    most = positions(folder)
    chosen: dict[str, dict[str, Any]] = {
        "mid_training": {"tokens": 0},
        "algorithm": {"learning_rate": RATE, "constant_tokens": 0},
        "limits": limits(most, given if isinstance(given := raw.get("limits"), dict) else {}),
    }
    production = raw.setdefault("production", {})
    if CONTEXT + 2 * TURN > most and isinstance(production, dict):
        given = production.setdefault("limits", {})
        for key, value in limits(most, given).items() if isinstance(given, dict) else ():
            given.setdefault(key, value)
    for name, defaults in chosen.items():
        keys = raw.setdefault(name, {})
        for key, value in defaults.items() if isinstance(keys, dict) else ():
            keys.setdefault(key, value)


def positions(folder: str) -> int:
    """max_position_embeddings of a Hugging Face folder."""
    try:
        read = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return POSITIONS
    return read if isinstance(read, int) and read >= 64 else POSITIONS


def limits(positions: int, given: dict[str, Any]) -> dict[str, Any]:
    """The keys of [limits] for a model with this number of positions. given: keys that are set."""
    turn, context, most = (
        value if isinstance(value := given.get(key), int) and value > 0 else 0
        for key in ("max_turn_tokens", "context_tokens", "max_tokens")
    )
    context = context or max(turn + 1, min(CONTEXT, positions - 2 * (turn or min(TURN, positions // 8))))
    behind = (positions - context) // 2  # a turn and a summary, each of a turn's tokens
    turn = turn or max(1, min(TURN, positions // 8, context // 4, most or TURN, behind if behind > 0 else TURN))
    return {
        "max_turns": 50,
        "max_turn_tokens": turn,
        "context_tokens": context,
        "max_tokens": most or max(turn, context // 2),
        "wall_s": 1800.0,
    }
