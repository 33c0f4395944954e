"""Bytes that published versions take, by the configuration: their deltas in the stream HR_WEIGHTS, full snapshots at
their location, and files on the disk of each node.

A full snapshot counts as the file of a version, although chunks of bfloat16 are about a third smaller: a limit that is
too small stops publishing in the middle of a run, and one that is too large costs nothing.
"""

from pathlib import Path

from headrace.config.tree import Config

DELTAS = 0.25
"""Ratio: bytes of the deltas of a chain to bytes of one file. With 32 versions in a chain it is 0.02 to 0.2."""


def chains_kept(config: Config) -> int:
    """The most chains (a full snapshot and the deltas after it) that are kept at once: the kept chains and
    the one that is being published, or all chains of the run where none is collected. A branch has no last step, so
    nothing but `collect_chains` bounds its chains: it counts with three."""
    section = config.weights
    every = 3 if config.feedback.base else 1 + config.curriculum.steps // section.anchor_every
    return min(every, section.collect_chains + 1) if section.collect_chains else every


def stream_bytes(config: Config, file_bytes: int) -> int:
    """Bytes of HR_WEIGHTS. file_bytes: of the file of a version."""
    return int(chains_kept(config) * file_bytes * DELTAS)


def folder(config: Config, run: str) -> Path:
    """The folder of this node in which the files of a run's versions are, so that each can be a link to another."""
    memory = config.weights.memory_dir
    return Path(memory) / f"headrace-{run}" if memory else Path(config.run.dir) / run


def versions_kept(config: Config) -> int:
    """The most versions on a node at once without pinned ones: the newest, and the one that is written. The files of
    its trainer, sender, receiver and servers are links."""
    return config.weights.keep + 1


def checkpoints_kept(config: Config) -> int:
    """The most checkpoints that are on the trainer's disk at once: the one that is written, the newest, and those from
    which the kept steps can be replayed."""
    return 2 + steps_kept(config) // config.trainer.checkpoint_every


def steps_kept(config: Config) -> int:
    """The most steps whose records are kept."""
    return min(config.curriculum.steps, max(config.replay.keep_steps, config.curriculum.staleness + 2))


def how_to_fit(config: Config) -> str:
    """The settings with which fewer bytes suffice in the stream."""
    fewer = f" or weights.collect_chains = 2 ({config.weights.collect_chains})"
    return f"set bus.stream_gib.weights{fewer if config.weights.collect_chains != 2 else ''}"
