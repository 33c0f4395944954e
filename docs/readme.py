# ruff: noqa: E501 - a row of a table is a line
"""Writes the figures of README.md's tables from benchmarks/results (`make docs`).

A row is made from a template whose fields name a file of results and a key. A file that lacks what its row says (a run
that does not balance, a target that is missed and not named) ends the script.
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
sys.path.insert(0, str(ROOT))
from tests.support.cheating import CHEATS  # noqa: E402 - the tests are no installed package
from tests.support.honest import HONEST  # noqa: E402

DEMO = """\
| what | figure |
|---|---|
| {demo[heldout_tasks]} held-out tasks, temperature 1 | {demo[heldout_before]:.2f} before, {demo[heldout_after_t1]:.2f} after {demo[steps]} steps; tasks of the same templates as in training |
| the same, greedy | {demo[heldout_after_greedy]:.2f} after; the greedy rate before was not measured |
| {demo[unseen_templates][tasks]} tasks of templates without training | {demo[unseen_templates][before]:.2f} before, {demo[unseen_templates][after_t1]:.2f} after: the tiny policy reproduces function bodies from its training |
| by length of the function, temperature 1 | {families[multi_line][0]} of {families[multi_line][1]} with several lines, {families[one_line][0]} of {families[one_line][1]} with one line |
| run | {demo[episodes]:,} episodes in {demo[vm_clones]:,} VM clones, {demo[wall_s]:,.0f} s, {demo_cpu_s:,.0f} CPU-seconds; 977 s and 1,725 CPU-seconds on 2026-11-27 (commit f1bae7a6, before equal attempts shared a verdict; mid-training took 229 s, here 123) |
| staleness and mismatch | staleness {demo[staleness_max]} of {demo[ledger][staleness_bound]}; largest difference of log-probabilities {demo[max_abs_dlp]} over {demo[rescored_tokens]:,} re-scored of {demo[tokens_sampled]:,} tokens |
| product lane | {demo[production][requests]} requests: {demo[production][p50_s]:.1f} s median, {demo[production][p99_s]:.0f} s p99; slowest of {demo[production][reclaims]} reclaims by the scavenger {demo[production][reclaim_max_s]:.2f} s |
| audit | balanced |
"""
MEASURED = """\
| what | figure and caveat | measured, commit | command |
|---|---|---|---|
| {chaos[kills][kills]} kills in microVMs, {chaos[stops_and_cuts][kills]} stops and cut connections, {chaos[restarts][kills]} kills of `headrace up` (docs/recovery.md) | every run balanced: {chaos_trained:,} of {chaos_issued:,} slots trained, none twice; after a kill recovery takes {recovery[all][p50_s]:.1f} s p50 and {recovery[all][p99_s]:.1f} s p99; the slowest kind is a killed {slowest_kind}, {recovery[slowest_s]:.1f} s; the first durable record comes after {recovery[at_work_again][p50_s]:.1f} s p50 and {recovery[at_work_again][p99_s]:.1f} s p99, waits for input included (load 3 to 6); children of a killed `up` gone within {chaos[restarts][gone_max_s]:.2f} s | {age[chaos]} | `make chaos` |
| repeating recorded steps (docs/replay.md) | {replay[finished_bitwise_equal_steps]} of 20 steps of a finished run and {replay[killed_bitwise_equal_steps]} of 5 of the run with faults are bit-equal, on the same machine | {age[replay]} | `headrace replay RUN --steps 20` |
| lossless weight deltas (docs/weights.md) | {weight_delta[at_0p94_pct_d8_zstd_ratio]:.0f}x smaller at {weight_delta[at_0p94_pct_changed_pct]:.2f} % changed, {weight_delta[at_0p94_pct_d10_zstd_ratio]:.0f}x with the codec for thin links, fireworks-delta-compression {weight_delta[at_0p94_pct_fireworks_arc_v3_ratio]:.0f}x; 63 M parameters | {age[weight_delta]} | `python -m benchmarks.weight_delta` |
| four regions at {fanout[link_mbit]} Mbit/s and 80 to 150 ms (docs/weights.md) | {fanout_mib:.0f} MiB delta staged in {fanout[delta_staged_s]:.1f} s at {fanout[changed_pct]} % changed weights; {fanout[delta_fraction_until_staged]:.2f} of the link used until staged, {fanout[delta_fraction_of_link]:.2f} until the link is quiet; delays simulated on loopback | {age[fanout]} | `python -m benchmarks.fanout` |
| a weight swap during decoding | a decode step of {swap_pause[swap_step_p50_ms]:.2f} ms (p50) instead of {swap_pause[calm_step_p50_ms]:.2f}; a model of 2.5 MB in the embedded engine | {age[swap_pause]} | `python -m benchmarks.swap_pause` |
| sampler against trainer (docs/kernels.md) | exact mode: all bits of {numerics[exact_tokens]:,} sampled tokens equal in bfloat16, ordinary mode: none; exact decode takes {exact_least:.2f} to {exact_most:.2f} times the ordinary time (a busy CPU with bfloat16 instructions) | {age[numerics]} | `python -m benchmarks.numerics` |
| a real SGLang server that is killed under load (docs/sglang.md) | all {demo_sglang[sglang_attempts][kept]} attempts kept, audit balanced; SGLang on the CPU, tiny model | {age[demo_sglang]} | `python -m benchmarks.demo_sglang --kill` |
| asynchronous over synchronous training, heavy-tailed waits injected into tool calls | {a[waits_async2_over_sync_ratio]:.1f}x trained tokens per second at staleness 2 in the process backend, not isolated; in microVMs {a[vms_sleeps_async2_over_sync_ratio]:.1f}x if `run_tests` sleeps as recorded shell calls did (three seeds, load {load_least:.1f} to {load_most:.1f}, {a[vms_sleeps_sync_cpu_s_per_s]:.2f} and {a[vms_sleeps_async2_cpu_s_per_s]:.2f} CPU-seconds a second, {a[vms_sleeps_steps]} steps; the reward differs by {sleeps_samples:+.2f} at equal samples, with a standard error of {a[vms_sleeps_reward_lost_error]:.2f}, and by {sleeps_time:+.2f} at equal time; {a[vms_sleeps_async2_over_sync_attempts_ratio]:.1f}x trained attempts per second), and {a[vms_waits_async2_over_sync_ratio]:.2f}x if waits are short and the VMs fill two cores; without waits {a[plain_async2_over_sync_ratio]:.2f}x. Two targets are missed: at equal samples without waits the reward is {t[plain_reward_lost_in_standard_errors][value]} standard errors below that of synchronous training (target: at most {t[plain_reward_lost_in_standard_errors][target]}), and with balanced load the rollout actors are busy {t[balanced_async2_rollout_busy_within_ratio][value]} of the time (target: {t[balanced_async2_rollout_busy_within_ratio][target]}) | {age[async_vs_sync]} | `python -m benchmarks.async_vs_sync` |
| the bus compared with Ray | small call {bus[ray_call_over_ours_ratio]:.1f}x as fast; durable flow {bus[shared_flow_over_ray_ratio]:.1f}x through shared memory of one node, {bus[broker_flow_over_ray_ratio]:.1f}x through the broker | {age[bus]} | `python -m benchmarks.bus` |
| a lag of four versions at 3.3 times the demo's learning rate | truncated importance sampling collapses, clipping and the guard hold; process backend, not isolated, one or two seeds per arm | {age[lag_study]} | `python -m benchmarks.lag_study` |
| self-summarisation in the real loop (docs/models.md) | which of four values a summary must keep is learnt from the final reward: {compaction[heldout_tasks]} held-out tasks {compaction[heldout_before]:.2f} before, {compaction[heldout_after_t1]:.2f} after {compaction[steps]} steps, two summaries behind the values; one seed, tiny policy mid-trained to summarise, process backend, not isolated; the same seed in microVMs reached 0.62 | {age[proof_compaction_process]} | `make proof-compaction BACKEND=process` |
| a clone of the Debian image compared with its cold boot (docs/sandboxes.md) | {vm_clone[boot_over_clone_wall_ratio]:.0f}x less wall time, {vm_clone[boot_over_clone_cpu_ratio]:.0f}x less CPU; {vm_clone[warm_acquire_p50_ms]:.1f} ms to acquire a warm clone; TCG, so a boot costs more than under KVM | {age[vm_clone]} | `python -m benchmarks.vm_clone` |
| {cheats} ways to cheat and {honest} honest attempts, five shapes of tests (docs/sandboxes.md) | no cheat rewarded outside of the three kinds that the page lists, no honest attempt punished; process backend, not isolated | at every `make test-all` | `pytest -m 'slow or not slow' tests/laws/test_cheats.py` |
"""
AGED = (
    *("chaos", "replay", "weight_delta", "fanout", "swap_pause", "numerics", "demo_sglang", "async_vs_sync", "bus"),
    *("lag_study", "proof_compaction_process", "vm_clone"),
)
"""The files whose rows name their age."""


def results(name: str) -> Any:
    """A file of benchmarks/results, decoded."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def fields() -> dict[str, Any]:
    """The templates get these. AssertionError where a label of a row does not hold of its file."""
    files = {name: results(name) for name in (*AGED, "demo", "proof")}
    files["numerics"] = files["numerics"]["bfloat16"]
    chaos, demo, waits, study = (files[name] for name in ("chaos", "demo", "async_vs_sync", "lag_study"))
    slots = [chaos[part]["audit"] for part in ("kills", "stops_and_cuts")]
    assert all(audit["balanced"] and not audit["duplicates"] for audit in slots) and not chaos["restarts"]["unbalanced"]
    assert demo["ledger"]["balanced"] and files["demo_sglang"]["sglang_balanced"]
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
    numerics = files["numerics"]
    assert (numerics["exact_bit_equal_share"], numerics["ordinary_bit_equal_share"]) == (1.0, 0.0)
    exact = [numerics[f"decode_b{batch}_exact_over_ordinary"] for batch in (1, 4, 16, 64)]
    sides = ("vms_sleeps_sync", "vms_sleeps_async2")
    loads = [load for side in sides for load in waits[f"{side}_load_by_seed"]]
    before, after = (waits[f"{side}_reward_at_equal_wall_mean"] for side in sides)
    kinds = {"kill": "process", "machine_kill": "machine", "broker_kill": "broker"}
    return files | {
        "age": {name: "{date}, {commit}".format(**files[name]["conditions"]) for name in AGED},
        "families": demo["families"]["heldout_after_t1"],
        "demo_cpu_s": sum(demo["cpu_s"].values()),
        "recovery": chaos["kills"]["recovery"],
        "slowest_kind": kinds[chaos["kills"]["recovery"]["slowest_kind"]],
        "chaos_issued": sum(audit["issued"] for audit in slots) + chaos["restarts"]["issued_slots"],
        "chaos_trained": sum(audit["trained"] for audit in slots) + chaos["restarts"]["trained_slots"],
        "fanout_mib": files["fanout"]["delta_wire_bytes"] / 2**20,
        "exact_least": min(exact),
        "exact_most": max(exact),
        "a": waits,
        "t": waits["targets"],
        "load_least": min(loads),
        "load_most": max(loads),
        "sleeps_samples": -waits["vms_sleeps_reward_lost"],
        "sleeps_time": after - before,
        "compaction": files["proof_compaction_process"],
        "cheats": len(CHEATS),
        "honest": len(HONEST),
    }


def proof_rows(proof: dict[str, Any]) -> str:
    """The rows of `make proof`, one a seed."""
    rows = []
    for index, seed in enumerate(proof["seeds"].split(",")):
        cells = [f"{proof[f'heldout_{name}'][index]:.3f}" for name in ("before", "after_t1", "after_greedy")]
        unseen = proof["unseen_templates"][index]
        cells += [f"{unseen[name]:.2f}" for name in ("before", "after_t1", "after_greedy")]
        rows.append(f"| {seed} | {' | '.join(cells)} |\n")
    return "".join(rows)


def page() -> str:
    """README.md with its tables made anew."""
    text, values = README.read_text(), fields()
    proof_head = "| seed | held-out before | after, temperature 1 | after, greedy | unseen before |"
    head = next(line for line in text.splitlines() if line.startswith(proof_head))
    proof = f"{head}\n|{'---|' * (head.count('|') - 1)}\n{proof_rows(values['proof'])}"
    for made in (DEMO.format_map(values), proof, MEASURED.format_map(values)):
        before, heading, rest = text.partition(made.partition("\n")[0] + "\n")
        assert heading, f"README has no table {made.partition(chr(10))[0]}"
        text = before + made + "\n" + rest.partition("\n\n")[2]
    demo = values["demo"]
    told = f"`make demo`, seed {demo['seed']}, {demo['conditions']['date']},"
    assert told in text and f"(load {demo['conditions']['load']:.1f}; benchmarks/results/demo.json)" in text, told
    return text


if __name__ == "__main__":
    README.write_text(page())
