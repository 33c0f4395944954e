// Curves over the steps, the staleness of tokens against the bound, evaluations, the newest events.
import { brief, clock, html, number, percent, put, span } from "../html.js";
import { state, stepsInOrder } from "../state.js";
import { bars, charts } from "./chart.js";

let plots = null;

export function overview(view) {
  if (!view.querySelector("#curves")) {
    view.innerHTML = `<div id="empty"></div><section id="curves"></section><div class="columns"><section id="staleness" tabindex="0"></section><section id="evals" tabindex="0"></section></div><section id="events"></section>`;
    plots = null;
  }
  const part = (id) => view.querySelector(`#${id}`), steps = stepsInOrder();
  put(part("empty"), steps.length ? "" : html`<p class="empty">No step yet${state.phase ? html`: the run is in ${state.phase}` : ""}. Curves appear with the first one.</p>`);
  if (steps.length) {
    plots ??= charts(part("curves"));
    const xs = steps.map((s) => s.step), of = (name) => steps.map((s) => (Number.isFinite(s[name]) ? s[name] : null));
    const smooth = (name) => steps.map((_, i) => { const w = steps.slice(Math.max(0, i - 4), i + 1); return w.reduce((a, s) => a + s[name], 0) / w.length; });
    plots.draw("pass", "Pass rate of training attempts", xs, [{ name: "each step", stroke: "--faint", values: of("pass_rate") }, { name: "mean of five", stroke: "--a", values: smooth("pass_rate"), fill: true }]);
    plots.draw("reward", "Reward", xs, [{ name: "each step", stroke: "--faint", values: of("reward_mean") }, { name: "mean of five", stroke: "--c", values: smooth("reward_mean"), fill: true }]);
    plots.draw("time", "Seconds of a step", xs, [{ name: "computing", stroke: "--a", values: of("seconds"), fill: true }, { name: "waiting", stroke: "--b", values: of("waited_s") }]);
    plots.draw("mismatch", "Sampler against trainer, nats a token", xs, [{ name: "k1", stroke: "--a", values: of("k1") }, { name: "k3", stroke: "--b", values: of("k3") }]);
    plots.draw("entropy", "Entropy of the policy, nats a token", xs, [{ name: "entropy", stroke: "--c", values: of("entropy"), fill: true }]);
    const acts = (name) => steps.map((s) => s.behaviour?.[name] ?? null);
    plots.draw("acts", "Behaviour of attempts, means", xs, [{ name: "calls by turn", stroke: "--a", values: acts("calls_per_turn") }, { name: "reads before the first edit", stroke: "--b", values: acts("reads_before_edit") }, { name: "lint errors fixed", stroke: "--c", values: acts("lint_fixed") }]);
    plots.draw("shares", "Share of attempts", xs, [{ name: "tested after the last edit", stroke: "--a", values: acts("tested") }, { name: "asked the user", stroke: "--b", values: acts("asked") }]);
    const own = [...new Set(steps.flatMap((s) => Object.keys(s.metrics ?? {})))];
    for (const name of own) plots.draw(`metric-${name}`, `${name.replaceAll("_", " ")} (figure of the loss)`, xs, [{ name, stroke: "--a", values: steps.map((s) => s.metrics?.[name] ?? null) }]);
    plots.draw("norm", "Gradient norm", xs, [{ name: "norm", stroke: "--a", values: of("grad_norm") }]);
  }
  const last = steps.at(-1), sums = new Map();
  for (const step of steps.slice(-20)) for (const [age, n] of Object.entries(step.staleness ?? {})) sums.set(Number(age), (sums.get(Number(age)) ?? 0) + n);
  const bound = last?.staleness_bound ?? 0, ages = last ? Array.from({ length: Math.max(bound, ...sums.keys(), 0) + 1 }, (_, age) => age) : [];
  put(part("staleness"), html`<h2>Staleness of tokens</h2>${last ? bars(ages.map((age) => [age === bound ? html`${age} <small>bound</small>` : age, sums.get(age) ?? 0, age > bound ? "bad" : ""]), { mark: "Versions between sampling and training, tokens of the last 20 steps." }) : html`<p class="empty">No token was trained yet.</p>`}`);
  const evals = [...state.evals.values()];
  put(part("evals"), html`<h2>Evaluations</h2>${evals.length ? html`<table><thead><tr><th>why</th><th>suite</th><th class="n">version</th><th class="n">passed</th><th class="n">rate</th><th class="n">took</th></tr></thead><tbody>${evals.map((e) => html`<tr><td>${(e.reason || e.id).replaceAll("_", " ")}</td><td>${e.suite}</td><td class="n">${e.version}</td><td class="n">${e.passed} of ${e.tasks}</td><td class="n">${percent(e.rate)}</td><td class="n">${brief(e.seconds)}</td></tr>`)}</tbody></table>` : html`<p class="empty">None yet.</p>`}`);
  put(part("events"), html`<h2>Events</h2><table class="events"><tbody>${state.events.slice(-40).reverse().map((e) => html`<tr class="${e.level}"><td class="n">${clock(e.time)}</td><td>${e.actor}</td><td>${e.kind}</td><td class="wide">${e.text}</td></tr>`)}</tbody></table>${state.events.length ? "" : html`<p class="empty">None yet.</p>`}`);
  return () => { plots?.end(); plots = null; };
}
