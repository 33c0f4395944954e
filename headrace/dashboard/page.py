"""report.html: the report of a run on one page that needs no script and no network."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from headrace.config import Config
from headrace.dashboard import errors, summary, transcripts
from headrace.dashboard.charts import bars, busy_strips, line_chart
from headrace.dashboard.efficiency import in_order
from headrace.dashboard.hypertext import escape
from headrace.dashboard.records import RunRecords
from headrace.dashboard.report import RunReport, curve_of
from headrace.dashboard.watch import Watch
from headrace.messages.training import Efficiency

STYLE = """
:root { --ink: #1d2733; --paper: #fbfaf7; --soft: #5b6673; --rule: #dfe3e6; --tint: #eef1f3;
  --a: #0a5f7d; --b: #cf6a1f; --c: #7ba428; --d: #8a3c78; --e: #98a2ac; --f: #2b2b2b }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8eb; --paper: #14191f; --soft: #a3aeb8; --rule: #2b333c; --tint: #1b222a;
    --a: #52b4d4; --b: #f0a36c; --c: #b9dc7f; --d: #d08fc2; --e: #7f8a94; --f: #f4f4f4 } }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1180px;
  margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem; margin: 0; overflow-wrap: anywhere } h2 { font-size: 1.1rem; margin: 2rem 0 .6rem }
h3 { font-size: .95rem; margin: 1.2rem 0 .3rem } p { margin: .4rem 0 } .soft, em { color: var(--soft) }
.verdict { font-size: 1.2rem; font-weight: 600; margin: .8rem 0 } a { color: var(--a) }
.pairs { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: .6rem 2rem }
.pairs > * { min-width: 0 }
figure { margin: 0 0 .8rem } figcaption { font-weight: 600 } svg { width: 100%; height: auto; display: block }
svg text { font-size: 12px; fill: var(--soft) } .grid { stroke: var(--rule) }
polyline { fill: none; stroke-width: 2 } circle { stroke: none }
.s0 { stroke: var(--a) } .s1 { stroke: var(--b); stroke-dasharray: 7 4 } .s2 { stroke: var(--c); stroke-dasharray: 2 3 }
.s3 { stroke: var(--d); stroke-dasharray: 9 3 2 3 } .s4 { stroke: var(--e) }
.s5 { stroke: var(--f); stroke-dasharray: 1 5 }
.s6 { stroke: var(--a); stroke-dasharray: 12 6 } .s7 { stroke: var(--b) }
circle.s0 { fill: var(--a) } circle.s1 { fill: var(--b) } circle.s2 { fill: var(--c) } circle.s3 { fill: var(--d) }
circle.s4 { fill: var(--e) } circle.s5 { fill: var(--f) } circle.s6 { fill: var(--a) } circle.s7 { fill: var(--b) }
.busy { fill: var(--a) } .legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem }
.legend svg { display: inline-block; width: 1.8rem; height: .6rem; margin-right: .4rem }
table { border-collapse: collapse; width: 100% }
td { padding: .25rem .5rem .25rem 0; border-bottom: 1px solid var(--rule); overflow-wrap: anywhere }
td.number { text-align: right; font-variant-numeric: tabular-nums }
.bar { width: 50% } .bar div { background: var(--a); height: .7rem }
abbr { text-decoration: underline dotted; cursor: help } dt { font-weight: 600 } dd { margin: 0 0 .5rem }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--tint); padding: .7rem; margin: .3rem 0;
  font-size: 12.5px } .call { color: var(--a) } .bad { color: var(--b) } details > summary { cursor: pointer }
.strips { max-width: 760px } @media (max-width: 560px) { svg text { font-size: 19px } }
@media print { body { max-width: none; margin: 0 } figure { break-inside: avoid } }
"""

GLOSSARY = {
    "pass rate": "The share of attempts whose hidden tests all pass.",
    "temperature 1": "Tokens are drawn from the policy's distribution; greedy sampling takes the most probable one.",
    "staleness": "How many versions older than the trained one the version was that sampled a token.",
    "entropy": "How undecided the policy is about its next token, in nats; near 0 it no longer explores.",
    "k1": "The sampler's minus the trainer's log-probability of sampled tokens, mean; 0 in exact mode.",
    "held-out tasks": "Tasks of the kinds that are trained on, which are never trained on themselves.",
    "other templates": "Tasks of kinds that are never trained on.",
    "audit": "The proof that every issued attempt was trained once, or dropped for a reason on record.",
}
"""Term to its meaning."""


def term(name: str, shown: str = "") -> str:
    """A term that shows its meaning and leads to the glossary."""
    meaning = escape(GLOSSARY[name])
    return f"<a href='#glossary'><abbr title='{meaning}'>{escape(shown or name)}</abbr></a>"


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


def learning(watch: Watch) -> str:
    """The curves of learning: pass rates and entropy, evaluations, reward, mismatch."""
    steps = watch.steps
    if not steps:
        return "<p>The run took no step.</p>"
    smooth = [
        (float(step.step), sum(other.pass_rate for other in steps[max(0, index - 4) : index + 1]) / min(index + 1, 5))
        for index, step in enumerate(steps)
    ]
    points = curve_of(watch.evaluations)
    measured = {
        suite: [(point.version, point.rate) for point in points if point.suite == suite]
        for suite in sorted({point.suite for point in points})
    }
    charts = [
        line_chart(
            "Pass rate of training attempts, and entropy in nats",
            {"pass rate, each step": [(s.step, s.pass_rate) for s in steps], "mean of five steps": smooth},
            "step",
            {"entropy": [(s.step, s.entropy) for s in steps]},
        ),
        line_chart("Pass rate of evaluations during training", measured, "version"),
        line_chart("Reward of an attempt, mean", {"reward": [(s.step, s.reward_mean) for s in steps]}, "step"),
        line_chart(
            "Staleness, largest, in versions; k1 in nats",
            {"staleness": [(s.step, s.staleness_max) for s in steps]},
            "step",
            {"k1": [(s.step, s.k1) for s in steps]},
        ),
    ]
    return f"<div class='pairs'>{''.join(charts)}</div>"


def details(watch: Watch) -> str:
    """The other curves: behaviour, the trainer's time and memory, gradient norm."""
    steps = watch.steps
    told = in_order(steps, watch.failed_steps)
    charts = [
        *(
            line_chart(
                title,
                {"mean": [(s.step, getattr(s.behaviour, name)) for s in steps if s.behaviour is not None]},
                "step",
            )
            for name, title in BEHAVIOUR.items()
        ),
        *(_efficiency(told) if told else ()),
        line_chart("Gradient norm", {"norm": [(s.step, s.grad_norm) for s in steps]}, "step"),
    ]
    return f"<div class='pairs'>{''.join(charts)}</div>"


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


def facts(report: RunReport, config: Config) -> str:
    """The size of the run and its duration by part."""
    curriculum, time = config.curriculum, report.time
    where = f"{report.backend or 'no'} sandboxes" + ("" if report.isolated else ", not isolated")
    return (
        f"{report.steps} of {curriculum.steps} steps of {curriculum.groups_per_step} groups of {curriculum.group_size} "
        f"attempts; {report.episodes:,} attempts in {where}, {report.vm_clones:,} VM clones. "
        f"{report.wall_s:.0f} s: {time.setup_s:.0f} s of preparation, {time.mid_training_s:.0f} s of mid-training, "
        f"{time.rl_s:.0f} s of reinforcement learning, {time.eval_s:.0f} s of evaluation."
    )


def render(report: RunReport, watch: Watch, records: RunRecords, prompts: transcripts.Prompts) -> str:
    """The whole page."""
    begin = watch.started
    everything = msgspec.json.format(msgspec.json.encode(report), indent=2).decode()
    before, after = (records.evaluations.get(reason) for reason in (transcripts.BEFORE, transcripts.AFTER))
    advice = "".join(f"<li>{escape(text)}</li>" for text in summary.next_steps(report, watch.steps))
    balance = "balances" if report.ledger.balanced else "DOES NOT balance"
    unseen = report.unseen_templates
    meanings = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in GLOSSARY.items())
    return f"""<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><title>headrace {escape(report.run)}</title><style>{STYLE}</style>
<main><h1>Run {escape(report.run)}</h1><p class="soft">{escape(report.finished)}, seed {report.seed}</p>
<p class="verdict">{escape(summary.learnt(before, after))}</p>
<p>{escape(facts(report, watch.config))} The {term("audit")} {balance}.
{term("staleness", "Staleness")}: {number(report.staleness_max)} of {report.ledger.staleness_bound}.
{term("other templates", "Other templates")}: {term("pass rate")} {number(unseen.before)} before,
{number(unseen.after_t1)} after, at {term("temperature 1")}.</p>
{f"<p class='soft'>On purpose: {escape(report.planted)}.</p>" if report.planted else ""}
<div class="pairs"><section><h2>What limited the speed</h2><p>{escape(summary.limit(report))}</p></section>
<section><h2>What to try next</h2><ul>{advice}</ul></section></div>
<h2>Learning</h2><p class="soft">What is shown: {term("pass rate")}, {term("entropy")}, {term("staleness")},
{term("k1")}.</p>{learning(watch)}
<h2>One task before and after training</h2>{transcripts.section(records, prompts)}
<h2>Who worked when</h2><div class="strips">{busy_strips(dict(watch.busy), begin, begin + report.wall_s)}</div>
<h2>Appendix</h2>
<details open id="glossary"><summary>Terms</summary><dl>{meanings}</dl></details>
<details><summary>Two more attempts after training</summary>
<div class="pairs">{transcripts.others(records, prompts)}</div></details>
<details><summary>Figures</summary>{headline(report)}</details>
<details><summary>Behaviour, time, memory and gradient over the steps</summary>{details(watch)}</details>
<details><summary>CPU time per process</summary>{bars(report.cpu_s, "CPU-s")}</details>
<details {"open" if report.errors else ""}><summary>Errors</summary>{errors.section(watch)}</details>
<details><summary>report.json</summary><pre>{escape(everything)}</pre></details></main></html>
"""
