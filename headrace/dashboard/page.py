"""report.html: the report of a run on one page that needs no script and no network."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from headrace.dashboard import errors, transcripts
from headrace.dashboard.charts import bars, busy_strips, line_chart
from headrace.dashboard.efficiency import in_order
from headrace.dashboard.hypertext import escape
from headrace.dashboard.records import RunRecords
from headrace.dashboard.report import RunReport, curve_of
from headrace.dashboard.watch import Watch
from headrace.messages.training import Efficiency

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
    """A figure as text."""
    if value is None:
        return "not measured"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def headline(report: RunReport) -> str:
    """The table at the top."""
    unseen, ledger, product = report.unseen_templates, report.ledger, report.production
    rows = [
        ("Held-out tasks passed at temperature 1, before", report.heldout_before),
        ("Held-out tasks passed at temperature 1, after", report.heldout_after_t1),
        (
            "Held-out tasks passed greedily: before, after",
            f"{number(report.heldout_before_greedy)}, {number(report.heldout_after_greedy)}",
        ),
        ("Templates without training: before, after (T=1)", f"{number(unseen.before)}, {number(unseen.after_t1)}"),
        (
            "Templates without training: before, after (greedy)",
            f"{number(unseen.before_greedy)}, {number(unseen.after_greedy)}",
        ),
        ("Held-out tasks", report.heldout_tasks),
        *(
            (f"Loss on held-out documents of {source}: before, after", f"{number(loss.before)}, {number(loss.after)}")
            for source, loss in report.held_out_loss.items()
        ),
        ("Steps", report.steps),
        *(
            [("Mean reward of a turn: first, last step", f"{number(turns[0])}, {number(turns[-1])}")]
            if (turns := report.turn_rewards)
            else []
        ),
        (
            "Episodes in isolated sandboxes"
            if report.isolated
            else f"Episodes ({report.backend} backend: NOT isolated)",
            report.episodes,
        ),
        ("VM clones", report.vm_clones),
        ("CPU of the VMs per episode, judge included", f"{number(report.cpu_ms_per_episode)} ms"),
        *((f"CPU of the VMs: {name}", f"{number(seconds)} s") for name, seconds in report.vm_cpu_s.items()),
        ("Largest staleness, bound", f"{number(report.staleness_max)}, {ledger.staleness_bound}"),
        ("Largest |sampler - trainer| log-probability", report.max_abs_dlp),
        *(
            (
                f"Engine {engine.engine}: k3, share of tokens that differ, flips per token-layer",
                f"{engine.k3:.2g}, {engine.differ:.2g}, {engine.flips:.2g}"
                + ("" if engine.same_fingerprint else " (other fingerprint)"),
            )
            for engine in report.engines
        ),
        ("Steps with a mismatch alarm", report.mismatch_alarms),
        ("Mean delta ratio", report.delta_ratio_mean),
        ("Audit", "balances" if ledger.balanced else "does not balance"),
        ("Users' requests", product.requests),
        ("Seconds of a request, median and p99", f"{number(product.p50_s)}, {number(product.p99_s)}"),
        ("Slowest reclaim by the scavenger", f"{number(product.reclaim_max_s)} s"),
        ("Unreadable records", report.unreadable_records),
        ("Wall time", f"{report.wall_s:.0f} s"),
    ]
    cells = "".join(
        f"<tr><td>{escape(name)}</td><td class='number'>{escape(number(value))}</td></tr>" for name, value in rows
    )
    return f"<table class='headline'>{cells}</table>"


BEHAVIOUR = {
    "calls_per_turn": "Calls per turn with a call",
    "reads_before_edit": "Reads and searches before the first edit",
    "tested": "Share of attempts that ran the tests after their last edit",
    "lint_fixed": "Lint errors fixed by an attempt",
    "asked": "Share of attempts that ask the user",
}
"""Title of each figure of `StepDone.behaviour`."""


def curves(watch: Watch) -> str:
    """Pass rate, staleness, mismatch and gradient norm over the steps, and the measured suites over the versions."""
    steps = watch.steps
    told = in_order(steps, watch.failed_steps)
    if not steps:
        return "".join(["<p>The run took no step.</p>", *(_efficiency(told) if told else ())])
    smooth = [
        (float(step.step), sum(other.pass_rate for other in steps[max(0, index - 4) : index + 1]) / min(index + 1, 5))
        for index, step in enumerate(steps)
    ]
    points = curve_of(watch.evaluations)
    measured: dict[str, Sequence[tuple[float, float]]] = {
        suite: [(point.version, point.rate) for point in points if point.suite == suite]
        for suite in sorted({point.suite for point in points})
    }
    return "".join(
        [
            line_chart("Pass rate of evaluations while training goes on", measured, "version"),
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
            *(
                line_chart(
                    title,
                    {"mean": [(s.step, getattr(s.behaviour, name)) for s in steps if s.behaviour is not None]},
                    "step",
                )
                for name, title in BEHAVIOUR.items()
            ),
            *_efficiency(told),
            line_chart("Gradient norm", {"norm": [(s.step, s.grad_norm) for s in steps]}, "step"),
        ]
    )


def _efficiency(told: Sequence[tuple[int, Efficiency]]) -> list[str]:
    """Charts of where the time of the steps went and of the work in them; MFU and HFU only where the peak is known.
    told: step and figures, of the steps that failed too."""
    figures = [(step, efficiency.figures()) for step, efficiency in told]

    def chart(title: str, names: Iterable[str]) -> str:
        lines = {name: [(step, values[name]) for step, values in figures if name in values] for name in names}
        return line_chart(title, {name: points for name, points in lines.items() if points}, "step")

    causes = dict.fromkeys(f"{cause}_s" for _, efficiency in told for cause in efficiency.seconds)
    utilised = any("mfu" in values for _, values in figures)
    optional = {
        "Largest memory of a process, and its plan (bytes)": ("peak_bytes", "planned_bytes"),
        "Longest time of a process in collectives, and waiting for a slower one (s)": (
            "longest_collectives_s",
            "longest_straggler_s",
        ),
    }
    return [
        chart("Seconds of a step by cause", causes),
        chart("Tokens per second of wall time", ("trained_tokens_per_s", "forwarded_tokens_per_s")),
        chart("Share of the devices' peak", ("mfu", "hfu"))
        if utilised
        else "<p>MFU and HFU: unknown peak; set [trainer] peak_tflops.</p>",
        chart("Busiest expert over the mean expert", ("expert_load",)),
        *(chart(title, names) for title, names in optional.items() if any(names[0] in values for _, values in figures)),
    ]


def render(report: RunReport, watch: Watch, records: RunRecords, prompts: transcripts.Prompts) -> str:
    """The whole page."""
    begin = watch.started
    everything = msgspec.json.format(msgspec.json.encode(report), indent=2).decode()
    return f"""<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><title>headrace {escape(report.run)}</title><style>{STYLE}</style>
<h1>Run {escape(report.run)}</h1><p>{escape(report.finished)}, seed {report.seed},
isolation {escape(report.isolation)}</p>
{headline(report)}
{f"<p>On purpose: {escape(report.planted)}.</p>" if report.planted else ""}
<h2>Curves</h2>{curves(watch)}
<h2>Utilisation of the actors</h2>{busy_strips(dict(watch.busy), begin, begin + report.wall_s)}
<h2>CPU time per process</h2>{bars(report.cpu_s, "CPU-s")}
<h2>One task before and after training</h2>{transcripts.section(records, prompts)}
<h2>Two more attempts after training</h2>{transcripts.others(records, prompts)}
<h2>Errors</h2>{errors.section(watch)}
<h2>All figures</h2><pre>{escape(everything)}</pre></html>
"""
