"""The figures that actors publish in Metric messages, as Prometheus metrics: name, kind and help text of each.

An actor calls `self.metric(name=value)`; `FIGURES` has a row for each pair of actor and figure. Names follow
``headrace_<thing>_<unit>[_total]``. No metric has an id as a label: Prometheus adds the process as ``instance``.
"""

from itertools import product
from typing import Literal, NamedTuple

SERVER_PREFIX = "server_"
"""Figures that a rollout actor passes on from its SGLang server begin with this."""


class Figure(NamedTuple):
    """A Prometheus metric for one figure of one kind of actor."""

    name: str
    """Without ``_total``, which a counter's sample adds."""
    help: str
    kind: Literal["gauge", "counter"] = "gauge"
    scale: float = 1.0
    """Factor that converts the figure to the unit in the name."""
    merge: Literal["sum", "min", "max"] = "sum"
    """How the figures of several actors of one kind in a process are combined."""


def _count(name: str, help: str) -> Figure:
    return Figure(name, help, "counter")


FIGURES: dict[tuple[str, str], Figure] = {
    ("curriculum", "groups_issued"): _count("headrace_issued_groups", "Groups issued by the curriculum."),
    ("curriculum", "groups_open"): Figure("headrace_open_groups", "Groups that wait for scores."),
    ("curriculum", "groups_closed"): _count("headrace_closed_groups", "Groups closed for training."),
    ("curriculum", "groups_dropped"): _count("headrace_dropped_groups", "Groups that are never trained on."),
    ("curriculum", "groups_retired"): _count("headrace_retired_groups", "Groups whose credit came back."),
    ("curriculum", "served_oldest"): Figure(
        "headrace_served_oldest_version", "Oldest version that a live replica serves; -1 without any.", merge="min"
    ),
    ("environment", "leases"): Figure("headrace_leased_sandboxes", "Sandboxes that a caller holds on this node."),
    ("environment", "calls"): _count("headrace_sandbox_calls", "Calls that sandboxes of this node answered."),
    ("environment", "vms"): Figure("headrace_live_machines", "Machines that run on this node."),
    ("environment", "sandboxes"): Figure("headrace_live_sandboxes", "Sandboxes that live on this node."),
    ("environment", "clones"): _count("headrace_machine_clones", "Machines that were ever made on this node."),
    ("environment", "vm_cpu_ms"): Figure(
        "headrace_machine_cpu_seconds", "CPU time of this node's machines.", "counter", 0.001
    ),
    **{
        ("environment", f"vm_cpu_{lane}_{role}_ms"): Figure(
            f"headrace_{lane}_{role}_machine_cpu_seconds", f"Of it, {lane} lane: machines of {text}.", "counter", 0.001
        )
        for lane, (role, text) in product(
            ("train", "eval", "production"),
            (("rollout", "episodes"), ("judge", "verdicts"), ("certifier", "certificates")),
        )
    },
    ("feedback", "received"): _count("headrace_received_ratings", "Ratings of users that were received."),
    ("feedback", "trained"): _count("headrace_trained_ratings", "Of them, those that the branch trained on."),
    ("feedback", "late"): _count("headrace_late_ratings", "Those that came too late."),
    ("feedback", "capped"): _count("headrace_capped_ratings", "Those above the cap of their user."),
    ("feedback", "opted_out"): _count("headrace_opted_out_ratings", "Those of tenants that do not allow training."),
    ("feedback", "unattributed"): _count("headrace_unattributed_ratings", "Those without a session in the stream."),
    ("feedback", "superseded"): _count("headrace_superseded_ratings", "Those that the user replaced."),
    ("feedback", "purged"): _count("headrace_purged_ratings", "Those deleted with their user's data."),
    ("feedback", "discarded"): _count("headrace_discarded_ratings", "Those of sessions that cannot be trained on."),
    ("feedback", "pending"): Figure("headrace_pending_ratings", "Those that wait for a batch or its step."),
    ("gateway", "turns_named"): _count("headrace_named_turns", "Clients' turns whose request names its session."),
    ("gateway", "turns_by_history"): _count("headrace_continued_turns", "Those that continue a session's history."),
    ("gateway", "turns_begun"): _count("headrace_first_turns", "Those without earlier turns, which begin a session."),
    ("gateway", "turns_unattributed"): _count(
        "headrace_unattributed_turns", "Those whose earlier turns belong to no open session."
    ),
    ("judge", "scored"): _count("headrace_scored_trajectories", "Trajectories that got a score."),
    ("judge", "reused"): _count("headrace_repeated_verdicts", "Those that repeat the verdict of an equal attempt."),
    ("judge", "passed"): _count("headrace_passed_trajectories", "Trajectories whose hidden tests passed."),
    ("judge", "sandboxes"): Figure("headrace_judge_sandboxes", "Sandboxes that the judge holds."),
    ("rollout", "episodes"): _count("headrace_finished_episodes", "Episodes that a rollout actor finished."),
    ("rollout", "sampled_tokens"): _count("headrace_sampled_tokens", "Tokens sampled by the policy."),
    ("rollout", "running"): Figure("headrace_running_episodes", "Episodes in progress."),
    ("rollout", "sandboxes"): Figure("headrace_rollout_sandboxes", "Sandboxes that rollout actors hold."),
    ("rollout", "version"): Figure("headrace_served_version", "Version that the engine samples with.", merge="min"),
    ("search", "searches"): _count("headrace_semantic_searches", "Searches that this node answered."),
    ("search", "hybrid"): _count("headrace_hybrid_searches", "Of them, those with an embedding model."),
    ("search", "vectors"): Figure("headrace_indexed_vectors", "Vectors that the search actor holds."),
    ("trainer", "version"): Figure("headrace_trained_version", "Newest version of the trainer.", merge="max"),
    ("trainer", "groups_ready"): Figure("headrace_ready_groups", "Closed groups that wait for their batch."),
    ("trainer", "mid_training_tokens"): _count("headrace_mid_training_tokens", "Tokens read in mid-training."),
    ("trainer", "mid_training_loss"): Figure("headrace_mid_training_loss_nats", "Loss of mid-training per token."),
    ("trainer", "mid_training_held_out_loss"): Figure(
        "headrace_mid_training_held_out_loss_nats", "Loss on held-out documents of mid-training, mean over sources."
    ),
    ("weight_sender", "version"): Figure("headrace_published_version", "Newest published version.", merge="max"),
    ("weight_sender", "wire_bytes"): Figure("headrace_version_wire_bytes", "Size of the newest delta on the wire."),
    ("weight_sender", "density"): Figure("headrace_version_changed_ratio", "Share of weights that the delta changes."),
    ("weight_sender", "encode_s"): Figure("headrace_version_encode_seconds", "Time to encode the newest version."),
    ("weight_receiver", "version"): Figure("headrace_staged_version", "Newest version verified here.", merge="min"),
    ("weight_receiver", "fetched_bytes"): Figure("headrace_version_fetched_bytes", "Bytes fetched for that version."),
}


def figure_of(actor: str, name: str) -> Figure:
    """The metric of a figure. KeyError, with what to do, for a figure that has none."""
    if actor == "rollout" and name.startswith(SERVER_PREFIX):
        return Figure(f"headrace_engine_{name.removeprefix(SERVER_PREFIX)}", f"SGLang server: {name}.")
    try:
        return FIGURES[actor, name]
    except KeyError:
        raise KeyError(f"the figure {name!r} of {actor} has no metric: add it to headrace/metrics/figures.py") from None
