// Curves of what the policy does, by the step that trained the attempts: calls a turn, reading before editing, tests, lint.
import { fetchJson } from "../main.js";
import { html, put } from "../html.js";
import { state, stepsInOrder } from "../state.js";
import { charts } from "./chart.js";
import { failed, panel } from "./panel.js";

let plots = null;
const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);
const ask = async (before) => {
  const found = await fetchJson(`api/panel/behaviour?after=${before?.last ?? 0}`);
  return { last: found.last, attempts: [...(before?.attempts ?? []), ...found.attempts] };
};

const opened = panel(ask, (view, { attempts }, fault) => {
  if (!view.querySelector("#behaviour")) { view.innerHTML = `<div id="note"></div><section id="behaviour"></section>`; view._text = undefined; plots?.end(); plots = null; }
  const byStep = new Map();
  for (const a of attempts) { const step = state.groups.get(a.group)?.step ?? -1; if (step >= 0) byStep.set(step, [...(byStep.get(step) ?? []), a]); }
  const steps = stepsInOrder().map((s) => s.step).filter((step) => byStep.has(step));
  put(view.querySelector("#note"), html`${failed(fault)}${steps.length ? html`<p class="note">Attempts of the train lane: ${attempts.length}. The curves are means over those that each step trained.</p>` : html`<p class="empty">No attempt of a trained group yet.</p>`}`);
  if (!steps.length) return;
  plots ??= charts(view.querySelector("#behaviour"));
  const of = (value) => steps.map((step) => mean(byStep.get(step).map(value).filter((v) => v !== null)));
  const one = (id, title, name, stroke, value) => plots.draw(id, title, steps, [{ name, stroke, values: of(value), fill: true }]);
  one("calls", "Calls of a turn", "mean", "--a", (a) => (a.turns ? a.calls / a.turns : null));
  one("reads", "Reads before the first edit", "mean", "--c", (a) => a.reads);
  one("tests", "Test runs of an attempt", "mean", "--a", (a) => a.tests);
  one("lint", "Share of attempts that fixed what lint found", "share", "--b", (a) => (a.lint === null ? null : Number(a.lint)));
});

export function behaviour(view) {
  const end = opened(view);
  return end ? () => { end(); plots?.end(); plots = null; } : undefined;
}
