"""report.html: what happened, on one page that needs nothing else."""

import json
from html import escape
from pathlib import Path
from typing import Any

from headrace.dashboard.charts import bars, busy_strips, line_chart
from headrace.dashboard.figures import Figures
from headrace.dashboard.watch import Watch
from headrace.messages.judging import Score
from headrace.messages.rollout import Trajectory

STYLE = """
:root { --ink: #1d2733; --paper: #fbfaf7; --soft: #6b7785; --rule: #dfe3e6;
  --a: #0b6e8f; --b: #c2571a; --c: #5a7d2b }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8eb; --paper: #14191f; --soft: #97a3ae; --rule: #2b333c;
    --a: #52b4d4; --b: #ef9a5f; --c: #a5c76d } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 720px;
  margin: 2.5rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin: 0 } h2 { font-size: 1.05rem; margin: 2.2rem 0 .6rem }
h3 { font-size: .95rem; margin: 1.4rem 0 .3rem } p, em { color: var(--soft) }
figure { margin: 0 0 1.4rem } figcaption { font-weight: 600 } svg { width: 100%; height: auto; display: block }
svg text { font-size: 11px; fill: var(--soft) } .grid { stroke: var(--rule) }
polyline { fill: none; stroke-width: 1.8 } circle { stroke: none }
.s0 { stroke: var(--a); color: var(--a) } .s1 { stroke: var(--b); color: var(--b) }
circle.s0 { fill: var(--a); stroke: none } circle.s1 { fill: var(--b); stroke: none }
.busy { fill: var(--a) } .legend span { margin-right: 1.2rem; font-weight: 600 }
table { border-collapse: collapse; width: 100% }
td { padding: .25rem .5rem .25rem 0; border-bottom: 1px solid var(--rule) }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
.bar { width: 60% } .bar div { background: var(--a); height: .7rem } .headline td.number { font-weight: 600 }
pre { white-space: pre-wrap; background: color-mix(in srgb, var(--ink) 5%, transparent); padding: .8rem;
  margin: .3rem 0; overflow-x: auto; font-size: 12.5px } .call { color: var(--a) } .bad { color: var(--b) }
"""


def number(value: Any) -> str:
    """A figure as people read it."""
    if value is None:
        return "not measured"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def headline(report: dict[str, Any]) -> str:
    """The short table."""
    unseen = report["unseen_templates"]
    rows = [
        ("Held-out tasks passed at temperature 1, before", report["heldout_before"]),
        ("Held-out tasks passed at temperature 1, after", report["heldout_after_t1"]),
        ("Held-out tasks passed greedily, after", report["heldout_after_greedy"]),
        (
            "Templates never trained on: before, after (T=1)",
            f"{number(unseen['before'])}, {number(unseen['after_t1'])}",
        ),
        ("Held-out tasks", report["heldout_tasks"]),
        ("Steps", report["steps"]),
        (
            "Episodes in microVMs" if report["backend"] != "process" else "Episodes (process backend: NOT isolated)",
            report["episodes"],
        ),
        ("VM clones", report["vm_clones"]),
        ("CPU of the VMs per episode, judge included", f"{number(report['cpu_ms_per_episode'])} ms"),
        ("Largest staleness, bound", f"{report['staleness_max']}, {report['ledger']['staleness_bound']}"),
        ("Largest |sampler - trainer| log-probability", report["max_abs_dlp"]),
        *(
            (
                f"Engine {engine['engine']}: k3, share of tokens that differ, flips per token-layer",
                f"{engine['k3']:.2g}, {engine['differ']:.2g}, {engine['flips']:.2g}"
                + ("" if engine["same_fingerprint"] else " (other fingerprint)"),
            )
            for engine in report["engines"]
        ),
        ("Steps with a mismatch alarm", report["mismatch_alarms"]),
        ("Mean delta ratio", report["delta_ratio_mean"]),
        ("Audit", "balances" if report["ledger"]["balanced"] else "does not balance"),
        (
            "Product: requests, median seconds",
            f"{report['production']['requests']}, {number(report['production']['p50_s'])}",
        ),
        ("Wall time", f"{report['wall_s']:.0f} s"),
    ]
    cells = "".join(
        f"<tr><td>{escape(name)}</td><td class='number'>{escape(number(value))}</td></tr>" for name, value in rows
    )
    return f"<table class='headline'>{cells}</table>"


def curves(watch: Watch) -> str:
    """Reward and pass rate, staleness, mismatch, loss."""
    steps = watch.steps
    if not steps:
        return "<p>No step was taken.</p>"
    smooth = [
        (float(step.step), sum(other.pass_rate for other in steps[max(0, index - 4) : index + 1]) / min(index + 1, 5))
        for index, step in enumerate(steps)
    ]
    return "".join(
        [
            line_chart(
                "Pass rate of training episodes",
                {"each step": [(step.step, step.pass_rate) for step in steps], "mean of five": smooth},
                "step",
            ),
            line_chart(
                "Largest staleness of a token", {"staleness": [(s.step, s.staleness_max) for s in steps]}, "step"
            ),
            line_chart(
                "k1, mean of sampler minus trainer log-probability", {"k1": [(s.step, s.k1) for s in steps]}, "step"
            ),
            line_chart("Gradient norm", {"norm": [(s.step, s.grad_norm) for s in steps]}, "step"),
        ]
    )


def transcript(trajectory: Trajectory, score: Score | None) -> str:
    """One episode: calls and what came back."""
    verdict = f"{score.verdict}, reward {score.reward:.2f}" if score else "not scored"
    lines = [
        f"<h3>version {trajectory.oldest_version}: {escape(trajectory.family)}, {escape(verdict)}</h3>",
    ]
    for turn in trajectory.turns:
        results = {result.call_id: result for result in turn.results}
        for call in turn.calls:
            arguments = " ".join(f"{key}={json.dumps(value)}" for key, value in call.arguments.items())
            lines.append(f"<pre><span class='call'>{escape(call.name)} {escape(arguments)}</span>")
            if call.error:
                lines.append(f"<span class='bad'>{escape(call.error)}</span>")
            result = results.get(call.id)
            lines.append(f"{escape(result.output) if result else ''}</pre>")
    lines += [
        f"<pre>{escape(path)} afterwards:\n{escape(data.decode('utf-8', 'replace'))}</pre>"
        for path, data in trajectory.diff.items()
    ]
    return "".join(lines)


def render(report: dict[str, Any], watch: Watch, figures: Figures, folder: Path) -> str:
    """The whole page."""
    begin = watch.started
    end = begin + float(report["wall_s"])
    episodes = "".join(transcript(trajectory, figures.scores.get(trajectory.id)) for trajectory in figures.transcripts)
    return f"""<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><title>headrace {escape(folder.name)}</title><style>{STYLE}</style>
<h1>Run {escape(folder.name)}</h1><p>{escape(str(report["finished"]))}, seed {report["seed"]},
isolation {escape(report["isolation"])}</p>
{headline(report)}
<p>Planted: {escape(report["planted"])}.</p>
<h2>Curves</h2>{curves(watch)}
<h2>Who was busy</h2>{busy_strips(dict(watch.busy), begin, end)}
<h2>Where the CPU time went</h2>{bars(report["cpu_s"], "CPU-s")}
<h2>Three episodes: before, middle, after</h2>{episodes or "<p>None.</p>"}
<h2>Everything</h2><pre>{escape(json.dumps(report, indent=2))}</pre></html>
"""
