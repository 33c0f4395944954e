# ruff: noqa: E501 - a row of a table is a line
"""Writes docs/evidence.md and the table of figures in README.md from benchmarks/results (`make docs`).

A row is a claim, and a template whose fields name a file of results and a key. A file that no longer says what its row
claims (a run that does not balance, a target that is missed and not named) ends the script.
"""

import json
import sys
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "evidence.md"
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT))
from tests.support.cheating import CHEATS  # noqa: E402 - the tests are no installed package
from tests.support.honest import HONEST  # noqa: E402


class Row(NamedTuple):
    """A claim with its figure. `readme`: README shows the row too."""

    file: str
    claim: str
    figure: str
    caveat: str
    command: str
    readme: bool = False


class Part(NamedTuple):
    """Rows under one heading."""

    heading: str
    rows: tuple[Row, ...]


PARTS = (
    Part(
        "Learning",
        (
            Row(
                "demo",
                "the tiny policy learns to fix bugs in microVMs",
                "{demo[heldout_tasks]} held-out tasks {demo[heldout_before]:.2f} to {demo[heldout_after_t1]:.2f} in {demo[steps]} steps and {demo[wall_s]:,.0f} s",
                "tasks of the templates that it trains on, temperature 1",
                "make demo",
                readme=True,
            ),
            Row(
                "demo",
                "and less on templates without training",
                "{demo[unseen_templates][tasks]} tasks {demo[unseen_templates][before]:.2f} to {demo[unseen_templates][after_t1]:.2f}",
                "the tiny policy repeats function bodies from its training",
                "make demo",
                readme=True,
            ),
            Row(
                "demo",
                "greedy, and by length of the function",
                "{demo[heldout_after_greedy]:.2f} greedy after; {families[multi_line][0]} of {families[multi_line][1]} with several lines, {families[one_line][0]} of {families[one_line][1]} with one line at temperature 1",
                "the greedy rate before was not measured",
                "make demo",
            ),
            Row(
                "demo",
                "what the run costs",
                "{demo[episodes]:,} episodes in {demo[vm_clones]:,} clones of VMs, {demo_cpu_s:,.0f} CPU-seconds, {demo[cpu_ms_per_episode]:.0f} CPU-ms of a VM's process an episode",
                "guests are emulated",
                "make demo",
            ),
            Row(
                "demo",
                "staleness is bounded, and sampler and trainer agree",
                "staleness {demo[staleness_max]} of {demo[ledger][staleness_bound]}; largest difference of log-probabilities {demo[max_abs_dlp]} over {demo[rescored_tokens]:,} re-scored of {demo[tokens_sampled]:,} tokens; the audit balances",
                "exact mode, embedded engine",
                "make demo",
            ),
            Row(
                "demo",
                "users are served while it trains",
                "{demo[production][requests]} requests: {demo[production][p50_s]:.1f} s at the median, {demo[production][p99_s]:.0f} s p99; slowest of {demo[production][reclaims]} reclaims {demo[production][reclaim_max_s]:.2f} s",
                "simulated users",
                "make demo",
            ),
            Row(
                "proof",
                "three seeds learn alike",
                "{proof[heldout_tasks]} held-out tasks each: {proof_before} before, {proof_after} after, {proof_greedy} greedy; unseen templates {proof_unseen_before} before, {proof_unseen_after} after",
                "two cores that did other work too; {proof_minutes:.0f} minutes where 90 are the target",
                "make proof",
            ),
            Row(
                "proof_pretrained",
                "a pretrained model learns: SmolLM2-135M",
                "held-out {pre[mid_trained_heldout_t1]:.2f} to {pre[reinforced_heldout_t1]:.2f}, unseen templates {pre[mid_trained_unseen_t1]:.2f} to {pre[reinforced_unseen_t1]:.2f} (three seeds)",
                "one H200, process backend, not isolated",
                "python -m benchmarks.proof_pretrained",
                readme=True,
            ),
            Row(
                "demo_pretrained",
                "the same model on two cores, in microVMs",
                "{dp[heldout_tasks]} held-out tasks {dp[heldout_before]:.2f} to {dp[heldout_after_t1]:.2f} in {dp[steps]} steps and {dp_minutes:.0f} minutes",
                "one seed; the cores ran tests too",
                "make demo-pretrained",
            ),
            Row(
                "proof_compaction_process",
                "the policy learns what a summary must keep",
                "{compaction[heldout_tasks]} held-out tasks {compaction[heldout_before]:.2f} to {compaction[heldout_after_t1]:.2f} in {compaction[steps]} steps",
                "one seed, mid-trained to summarise, process backend, not isolated; the same seed in microVMs reached {compaction_qemu[heldout_after_t1]:.2f}, and its target is missed",
                "make proof-compaction BACKEND=process",
            ),
            Row(
                "feedback_loop",
                "users' thumbs change what is served",
                "share of the liked answer {feedback_first:.2f} at the start, {feedback_last:.2f} at the end",
                "simulated users, a toy behaviour",
                "python -m benchmarks.feedback_loop",
            ),
            Row(
                "feedback_poison",
                "a minority of poisoners moves little",
                "{poison_capped:.1f} points with caps, {poison_uncapped:.0f} without",
                "2 % of simulated users",
                "python -m benchmarks.feedback_poison",
            ),
            Row(
                "lag_study",
                "a lag of four versions at 3.3 times the demo's rate",
                "truncated importance sampling collapses, clipping and the guard hold",
                "process backend, not isolated, one or two seeds an arm",
                "python -m benchmarks.lag_study",
            ),
        ),
    ),
    Part(
        "Nothing is lost",
        (
            Row(
                "chaos",
                "kills of processes, broker and machines lose nothing",
                "{chaos[kills][kills]} kills: {chaos[kills][audit][trained]:,} of {chaos[kills][audit][issued]:,} slots trained, none twice; recovery {recovery[all][p50_s]:.1f} s at the median, {recovery[all][p99_s]:.1f} s p99",
                "one machine; the broker's streams are on one disk",
                "make chaos",
                readme=True,
            ),
            Row(
                "chaos",
                "stops, cut connections, kills of `headrace up`",
                "{chaos[stops_and_cuts][kills]} stops and cuts, {chaos[restarts][kills]} kills: every run balances, {chaos_trained:,} of {chaos_issued:,} slots trained in all; children of a killed `up` gone within {chaos[restarts][gone_max_s]:.2f} s",
                "slowest recovery: a killed {slowest_kind}, {recovery[slowest_s]:.1f} s",
                "make chaos",
            ),
            Row(
                "rank_kills",
                "killed ranks of a trainer",
                "{rank_kills[trials]} kills over {rank_kills[ranks]} ranks: bits equal to the undisturbed run, training goes on after {rank_kills[go_on_median_s]:.1f} s at the median",
                "gloo, one machine",
                "python -m benchmarks.rank_kills",
            ),
            Row(
                "replay",
                "a recorded step repeats bit by bit",
                "{replay[finished_bitwise_equal_steps]} of 20 steps, {replay[killed_bitwise_equal_steps]} of 5 of a run with faults",
                "on the same machine",
                "headrace replay RUN --steps 20",
                readme=True,
            ),
        ),
    ),
    Part(
        "The same numbers in sampler and trainer",
        (
            Row(
                "numerics",
                "exact mode: equal bits",
                "all bits of {numerics[exact_tokens]:,} sampled tokens equal in bfloat16, ordinary mode none; decode takes {exact_least:.2f} to {exact_most:.2f} times the ordinary time",
                "embedded engine, a busy CPU with bfloat16 instructions",
                "python -m benchmarks.numerics",
                readme=True,
            ),
            Row(
                "gpu_step",
                "the step on one H200, in the shape of Qwen3-0.6B",
                "{gpu_tokens:,.0f} forwarded tokens a second, MFU {gpu_mfu:.2f} while busy, equal bits",
                "random weights; several GPUs were not measured",
                "python -m benchmarks.gpu_step",
                readme=True,
            ),
            Row(
                "demo_sglang",
                "a real SGLang server that is killed under load",
                "all {demo_sglang[sglang_attempts][kept]} attempts kept, the audit balances",
                "SGLang on the CPU, tiny model",
                "python -m benchmarks.demo_sglang --kill",
            ),
        ),
    ),
    Part(
        "Weights",
        (
            Row(
                "weight_delta",
                "lossless deltas",
                "{weight_delta[at_0p94_pct_d8_zstd_ratio]:.0f} times smaller at {weight_delta[at_0p94_pct_changed_pct]:.2f} % changed weights (fireworks-delta-compression {weight_delta[at_0p94_pct_fireworks_arc_v3_ratio]:.0f})",
                "63 M parameters, bfloat16; with the codec for thin links {weight_delta[at_0p94_pct_d10_zstd_ratio]:.0f} times",
                "python -m benchmarks.weight_delta",
                readme=True,
            ),
            Row(
                "fanout",
                "four regions at {fanout[link_mbit]} Mbit/s",
                "a delta of {fanout_mib:.0f} MiB is staged everywhere after {fanout[delta_staged_s]:.1f} s",
                "{fanout[changed_pct]} % changed; delays of 80 to 150 ms are simulated on loopback",
                "python -m benchmarks.fanout",
                readme=True,
            ),
            Row(
                "weight_node",
                "one file of a version on a node, for trainer, sender, receiver and servers",
                "{node[copies]} copy in memory, {node[files_on_disk]} files on disk; {node[large_s]:.0f} s from update to served, computed for 57 GiB (15 is the target)",
                "a mixture of {node[gib]:.2f} GiB; nothing of it ran on a GPU; two more runs gave 23 and 19 s, because the write varies",
                "python -m benchmarks.weight_node",
            ),
            Row(
                "swap_pause",
                "a swap while tokens are sampled",
                "a decode step of {swap_pause[swap_step_p50_ms]:.2f} ms at the median instead of {swap_pause[calm_step_p50_ms]:.2f}; {swap_pause[tokens_with_other_bits]} of {swap_pause[tokens_rescored]:,} tokens with other bits",
                "a model of 2.5 MB, embedded engine",
                "python -m benchmarks.swap_pause",
            ),
            Row(
                "weight_chaos",
                "kills and stops of sender, receiver and broker",
                "{weight_chaos[rounds]} faults: no partial or wrong file served",
                "one machine",
                "make chaos-weights",
            ),
            Row(
                "weight_fuzz",
                "corrupted records of weights",
                "{weight_fuzz[corruptions]:,} corruptions: {weight_fuzz[served_wrong]} served",
                "",
                "make fuzz",
            ),
        ),
    ),
    Part(
        "Speed",
        (
            Row(
                "async_vs_sync",
                "asynchronous over synchronous training",
                "{a[vms_sleeps_async2_over_sync_ratio]:.1f} times the trained tokens a second at staleness 2 with recorded waits, {a[plain_async2_over_sync_ratio]:.2f} without waits",
                "microVMs whose tests sleep as recorded shell calls did, and the process backend; two targets are missed",
                "python -m benchmarks.async_vs_sync",
                readme=True,
            ),
            Row(
                "async_vs_sync",
                "the same in detail",
                "{a[waits_async2_over_sync_ratio]:.1f} times in the process backend with injected waits; in microVMs {a[vms_waits_async2_over_sync_ratio]:.2f} if waits are short and the VMs fill two cores. With recorded waits the reward differs by {sleeps_samples:+.2f} at equal samples (standard error {a[vms_sleeps_reward_lost_error]:.2f}) and by {sleeps_time:+.2f} at equal time",
                "missed: without waits the reward is {t[plain_reward_lost_in_standard_errors][value]} standard errors below synchronous training (target {t[plain_reward_lost_in_standard_errors][target]}); with balanced load rollout actors are busy {t[balanced_async2_rollout_busy_within_ratio][value]} of the time (target {t[balanced_async2_rollout_busy_within_ratio][target]})",
                "python -m benchmarks.async_vs_sync",
            ),
            Row(
                "bus",
                "the bus compared with Ray",
                "a small call {bus[ray_call_over_ours_ratio]:.1f} times as fast; durable flow {bus[shared_flow_over_ray_ratio]:.1f} times through shared memory of a node, {bus[broker_flow_over_ray_ratio]:.1f} through the broker",
                "one machine",
                "python -m benchmarks.bus",
            ),
            Row(
                "first_token",
                "the first token of a streamed turn, 16 clients",
                "the gateway adds {ft[embedded_16][added_p50_ms]:.1f} ms at the median, {ft[embedded_16][added_p99_ms]:.1f} p99; a turn that its client left has ended in the engine after {ft[embedded_16][cut_p99_ms]:.0f} ms p99",
                "embedded engine, tiny policy",
                "python -m benchmarks.first_token",
            ),
            Row(
                "first_token",
                "the same with SGLang, and directly from the server",
                "{ft[sglang_16][client_p50_ms]:.0f} ms at the median and {ft[sglang_16][direct_p50_ms]:.0f} directly with 16 clients, {ft[sglang_256][client_p50_ms]:,.0f} and {ft[sglang_256][direct_p50_ms]:.0f} with 256: both targets are missed",
                "SGLang on the CPU; server, gateway, rollout actor, broker and clients share two cores",
                "make first-token",
            ),
            Row(
                "gateway_abuse",
                "hostile tenants of a gateway",
                "no request of others fails; their p99 grows {abuse[slow_turns]:.1f} times under slow turns, {abuse[disconnects]:.1f} under disconnects, {abuse[retries]:.1f} under repeats, {abuse[bodies]:.1f} under large bodies (1.1 is the target of each)",
                "client, broker, engine and gateway share two cores; the misuse runs at the lowest priority",
                "python -m benchmarks.gateway_abuse",
            ),
        ),
    ),
    Part(
        "Sandboxes and judging",
        (
            Row(
                "vm_clone",
                "a clone of a booted machine over its cold boot",
                "{vm_clone[boot_over_clone_wall_ratio]:.0f} times less wall time, {vm_clone[boot_over_clone_cpu_ratio]:.0f} times less CPU; a warm clone in {vm_clone[warm_acquire_p50_ms]:.1f} ms",
                "emulated without KVM, where a boot costs more",
                "python -m benchmarks.vm_clone",
                readme=True,
            ),
            Row(
                "images",
                "clones of a container image of {images[image_mib]:,.0f} MiB",
                "{images[clone_attached_cpu_p50_ms]:.0f} CPU-ms a clone, {images[twelve_clones_anon_max_mib]:.0f} MiB of own memory each",
                "emulated",
                "python -m benchmarks.images",
            ),
            Row(
                "",
                "cheating earns no reward",
                "{cheats} ways to cheat and {honest} honest attempts, five shapes of tests: every verdict is right outside of three listed kinds",
                "process backend, not isolated; the kinds stand in [verdicts](docs/verdicts.md)",
                "pytest -m 'slow or not slow' tests/laws/test_cheats.py",
                readme=True,
            ),
        ),
    ),
)
HEAD = """\
<!-- Written by docs/evidence.py: `make docs`. -->
# Evidence

What was measured, and how. Two shared cores without a GPU and guests emulated by QEMU's TCG where a row says nothing
else; load is the one-minute average when the program ended. Age counts days before the newest figure of this page.
A figure is repeated by its command; the files are in `benchmarks/results/`.
"""
STUDIES = (
    "Questions that were measured once. The program that measured one stood in `benchmarks/` of the named commit.\n"
)


def results(name: str) -> Any:
    """A file of benchmarks/results, decoded."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def conditions(content: Any) -> Any:
    """The conditions of a file of results, or of its newest part."""
    stated = content.get("conditions")
    return stated or max((part["conditions"] for part in content.values()), key=lambda part: part["date"])


def fields() -> dict[str, Any]:
    """The templates get these. AssertionError where a label of a row does not hold of its file."""
    files = {row.file: results(row.file) for part in PARTS for row in part.rows if row.file}
    files["numerics"] = files["numerics"]["bfloat16"]
    chaos, demo, proof, waits, study = (
        files[name] for name in ("chaos", "demo", "proof", "async_vs_sync", "lag_study")
    )
    slots = [chaos[part]["audit"] for part in ("kills", "stops_and_cuts")]
    assert all(audit["balanced"] and not audit["duplicates"] for audit in slots) and not chaos["restarts"]["unbalanced"]
    assert demo["ledger"]["balanced"] and files["demo_sglang"]["sglang_balanced"] and proof["audits_balanced"]
    assert (waits["backend"], waits["isolated"], waits["vms_backend"]) == ("process", False, "qemu")
    assert waits["vms_sleeps_seeds"] == "1,2,3"
    assert [name for name, entry in waits["targets"].items() if not entry["met"]] == [
        "plain_reward_lost_in_standard_errors",
        "balanced_async2_rollout_busy_within_ratio",
    ]
    assert (study["backend"], study["isolated"]) == ("process", False)
    runs, held = study["arms_runs"], study["held_runs"]
    assert held["truncated"] == 0 < runs["truncated"] and set(runs.values()) == {1, 2}
    assert all(held[arm] == runs[arm] for arm in ("clipped", "guarded"))
    numerics, gpu = files["numerics"], files["gpu_step"]
    assert (numerics["exact_bit_equal_share"], numerics["ordinary_bit_equal_share"]) == (1.0, 0.0)
    assert gpu["exact.max_abs_dlp"] == 0.0 and not files["gateway_abuse"]["not_served"]
    ranks = files["rank_kills"]
    assert ranks["hashes_equal"] == ranks["versions"] and ranks["balanced"] and not ranks["duplicates"]
    assert files["weight_chaos"]["partial_or_wrong"] == 0
    exact = [numerics[f"decode_b{batch}_exact_over_ordinary"] for batch in (1, 4, 16, 64)]
    before, after = (waits[f"{side}_reward_at_equal_wall_mean"] for side in ("vms_sleeps_sync", "vms_sleeps_async2"))
    kinds = {"kill": "process", "machine_kill": "machine", "broker_kill": "broker"}

    def three(values: list[float]) -> str:
        return ", ".join(f"{value:.2f}" for value in values)

    return files | {
        "families": demo["families"]["heldout_after_t1"],
        "demo_cpu_s": sum(demo["cpu_s"].values()),
        "proof_before": three(proof["heldout_before"]),
        "proof_after": three(proof["heldout_after_t1"]),
        "proof_greedy": three(proof["heldout_after_greedy"]),
        "proof_unseen_before": three([unseen["before"] for unseen in proof["unseen_templates"]]),
        "proof_unseen_after": three([unseen["after_t1"] for unseen in proof["unseen_templates"]]),
        "proof_minutes": proof["targets"]["total_minutes"]["value"],
        "pre": files["proof_pretrained"],
        "dp": files["demo_pretrained"],
        "dp_minutes": files["demo_pretrained"]["wall_s"] / 60.0,
        "recovery": chaos["kills"]["recovery"],
        "slowest_kind": kinds[chaos["kills"]["recovery"]["slowest_kind"]],
        "chaos_issued": sum(audit["issued"] for audit in slots) + chaos["restarts"]["issued_slots"],
        "chaos_trained": sum(audit["trained"] for audit in slots) + chaos["restarts"]["trained_slots"],
        "fanout_mib": files["fanout"]["delta_wire_bytes"] / 2**20,
        "exact_least": min(exact),
        "exact_most": max(exact),
        "gpu_tokens": gpu["exact.forwarded_tokens_s"],
        "gpu_mfu": gpu["exact.busy_mfu"],
        "a": waits,
        "t": waits["targets"],
        "sleeps_samples": -waits["vms_sleeps_reward_lost"],
        "sleeps_time": after - before,
        "compaction": files["proof_compaction_process"],
        "compaction_qemu": results("proof_compaction_qemu"),
        "feedback_first": files["feedback_loop"]["targets"]["first_share"]["value"],
        "feedback_last": files["feedback_loop"]["targets"]["last_share"]["value"],
        "poison_capped": files["feedback_poison"]["targets"]["capped_moved_points"]["value"],
        "poison_uncapped": files["feedback_poison"]["targets"]["uncapped_moved_points"]["value"],
        "ft": files["first_token"],
        "node": files["weight_node"],
        "abuse": files["gateway_abuse"]["p99_ratios"],
        "cheats": len(CHEATS),
        "honest": len(HONEST),
    }


def targets(files: dict[str, Any]) -> str:
    """A row per target of every file of results; a missed one is bold."""
    lines = ["| file | target | measured | bound |", "|---|---|---|---|"]
    for name, content in files.items():
        parts = {name: content} if "conditions" in content else {f"{name}, {part}": content[part] for part in content}
        for label, part in parts.items():
            for target, entry in (part.get("targets") or {}).items():
                row = f"{target} | {entry['value']:.6g} | {entry['target']:.6g}"
                lines.append(f"| {label} | {row} |" if entry["met"] else f"| **{label}** | **missed:** {row} |")
    return "\n".join(lines)


def evidence() -> str:
    """docs/evidence.md."""
    values = fields()
    files = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    dates = {name: conditions(content) for name, content in files.items()}
    newest = max(date.fromisoformat(entry["date"]) for entry in dates.values())
    text = HEAD
    for part in PARTS:
        text += f"\n## {part.heading}\n\n"
        text += "| claim | figure | caveat | command | date, commit, machine, load | age |\n|---|---|---|---|---|---|\n"
        for row in part.rows:
            when = "at every `make test-all` | 0"
            if row.file:
                said = dates[row.file]
                age = (newest - date.fromisoformat(said["date"])).days
                when = (
                    f"{said['date']}, {said['commit']}, {said.get('gpu', said['cpu'])}, {said.get('load', '–')} | {age}"
                )
            told = f"{row.claim} | {row.figure} | {row.caveat}".format_map(values).replace("](docs/", "](")
            text += f"| {told} | `{row.command}` | {when} |\n"
    _, head, studies = (RESULTS / "studies.md").read_text().partition("| study |")
    return f"{text}\n## Every target\n\n{targets(files)}\n\n## Answered studies\n\n{STUDIES}\n{head}{studies}"


def readme() -> str:
    """README.md with its table of figures made anew."""
    text, values = README.read_text(), fields()
    head = "| what | figure | caveat | command |\n|---|---|---|---|\n"
    before, heading, rest = text.partition(head)
    assert heading, "README has no table of figures"
    rows = [row for part in PARTS for row in part.rows if row.readme]
    assert len(rows) <= 12
    told = [f"{row.claim} | {row.figure} | {row.caveat}".format_map(values) for row in rows]
    made = "".join(f"| {line} | `{row.command}` |\n" for line, row in zip(told, rows, strict=True))
    return f"{before}{head}{made}\n{rest.partition(chr(10) * 2)[2]}"


if __name__ == "__main__":
    PAGE.write_text(evidence())
    README.write_text(readme())
