"""Opens a run's trainer: in this process, or in the processes of `[trainer] mesh`."""

from collections.abc import Callable, Iterable
from pathlib import Path

from headrace.config import Config
from headrace.training.mid_training import Progress, Trace
from headrace.training.parallel.interface import Others
from headrace.training.trainer import PolicyTrainer


def prepare(
    config: Config,
    folder: Path,
    *,
    tokenizer_json: str,
    traces: Callable[[], Iterable[Trace]],
    progress: Callable[[Progress], None] = lambda _: None,
    base: Path | None = None,
    waiting: Callable[[str], None] = lambda _: None,
    started: Callable[[Others], None] = lambda _: None,
) -> PolicyTrainer:
    """As `PolicyTrainer.prepare`, in one process or in several. GroupError when a rank cannot start. waiting, started:
    as in `open_ranks`. The caller closes the trainer."""
    if config.trainer.ranks == 1:
        return PolicyTrainer.prepare(
            config, folder, tokenizer_json=tokenizer_json, traces=traces, progress=progress, base=base
        )
    from headrace.training.parallel.opening import open_ranks  # its imports take a second, and one process needs none

    return open_ranks(
        config,
        folder,
        tokenizer_json=tokenizer_json,
        traces=traces,
        progress=progress,
        base=base,
        waiting=waiting,
        started=started,
    )
