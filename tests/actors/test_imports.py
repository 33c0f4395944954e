"""Actors that compute nothing with tensors start without torch, whose import takes seconds and some 200 MB."""

import subprocess

from headrace.python_modules import module_command

WITHOUT = (
    "curriculum", "dead_letter", "environment.actor", "evaluator", "feedback.actor", "gateway", "judge",
    "rollout.actor", "scavenger", "search", "weight_receiver", "weight_sender",
)  # fmt: skip


def test_actors_without_tensors_do_not_import_torch() -> None:
    modules = ", ".join(f"headrace.actors.{name}" for name in WITHOUT)
    command = [*module_command("x")[:2], "-c", f"import sys\nimport {modules}\nprint('torch' in sys.modules)"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "False"
