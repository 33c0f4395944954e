// Every actor: how busy it is, and for whom it waits when it is not.
import { count, html, percent, put, span } from "../html.js";
import { state } from "../state.js";
import { spark } from "./chart.js";
import { SILENT_S } from "./header.js";

const WAITS = {
  curriculum: ["credit", "trainer"], rollout: ["requests", "curriculum"], judge: ["trajectories", "rollout"], environment: ["calls", "rollout"], search: ["searches", "rollout"],
  trainer: ["closed groups", "judge"], weight_sender: ["a snapshot", "trainer"], weight_receiver: ["a version", "weight_sender"],
  evaluator: ["a request", "curriculum"], gateway: ["users", ""], feedback: ["thumbs", "gateway"], scavenger: ["quiet time", "gateway"], dead_letter: ["failures", ""],
};
const ORDER = Object.keys(WAITS);

export function conditionOf(a, now) {
  const { beat } = a;
  if (beat.state === "stopped") return ["stopped", "stopped"];
  if (now - a.at > SILENT_S) return state.finished ? ["stopped", "stopped"] : ["dead", `silent for ${span(now - a.at)}`];
  if (beat.state === "draining") return ["paused", "draining"];
  if (beat.state === "starting") return ["paused", "starting"];
  if (/^paused|reclaimed/.test(beat.status ?? "")) return ["paused", beat.status];
  const [what, whom] = WAITS[beat.actor] ?? ["work", ""];
  const from = whom ? ` from ${whom}` : "";
  if ((beat.busy ?? 0) < 0.05) return ["waiting", beat.waits ? `waits${from}: ${beat.waits}` : `waits for ${what}${from}`];
  return ["busy", beat.status || "works"];
}

const figures = (a) => {
  const values = {};
  for (const [key, m] of state.metrics) if (m.actor === a.beat.actor && (key.endsWith(`:${a.beat.id}`))) Object.assign(values, m.values);
  return Object.entries(values).filter(([name]) => !name.startsWith("server_")).map(([name, value]) => html`<span class="figure">${name.replaceAll("_", " ")} <b>${count(value)}</b></span>`);
};

export function actors(view) {
  const now = Date.now() / 1000;
  const all = [...state.actors.values()].sort((a, b) => ORDER.indexOf(a.beat.actor) - ORDER.indexOf(b.beat.actor) || a.key.localeCompare(b.key));
  put(view, html`<div class="cards">${all.map((a) => {
    const [kind, text] = conditionOf(a, now);
    return html`<article class="actor ${kind}"><header><h3>${a.key}</h3><span class="chip ${kind}">${kind}</span></header>
      <p class="what">${text}</p>
      <div class="load">${spark(a.history)}<b>${percent(a.beat.busy ?? 0)}</b></div>
      <p class="figures">${figures(a)}</p>
      <footer>${a.beat.node} · pid ${a.beat.pid}${kind === "dead" || !a.beat.status ? "" : html` · ${a.beat.status}`}</footer></article>`;
  })}</div>${all.length ? "" : html`<p class="empty">${state.connected ? "No actor has been heard of. A finished run has none." : "Not connected."}</p>`}`);
}
