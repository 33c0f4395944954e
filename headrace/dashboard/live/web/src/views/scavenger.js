// Load of the product, which samplers are lent to training, and when each was lent or taken back.
import { clock, html, number, put, span } from "../html.js";
import { state } from "../state.js";
import { asked, failed, panel } from "./panel.js";

export const scavenger = panel(asked("leases"), (view, { leases }, fault) => {
  const traffic = [...state.traffic.values()].filter((t) => !t.run || t.run === state.settings.run), now = Date.now() / 1000;
  const events = state.events.filter((e) => e.actor === "scavenger").slice(-60).reverse();
  put(view, html`${failed(fault)}<div class="columns"><section><h2>Load of the product</h2>${traffic.length ? html`<table><thead><tr><th>region</th><th>source</th><th class="n">active</th><th class="n">waiting</th><th class="n">requests/s</th><th class="n">capacity</th></tr></thead><tbody>${traffic.map((t) => html`<tr><td>${t.region}</td><td>${t.server ? `other clients of ${t.server}` : "gateway"}</td><td class="n">${t.active}</td><td class="n">${t.waiting}</td><td class="n">${number(t.requests_per_s, 1)}</td><td class="n">${t.capacity}</td></tr>`)}</tbody></table>` : html`<p class="empty">No gateway has reported its load since this page was opened.</p>`}</section>
  <section><h2>Leases</h2>${leases.length ? html`<table><thead><tr><th>sampler</th><th>lanes</th><th class="n">for</th><th>reason</th></tr></thead><tbody>${leases.map((l) => html`<tr><td>${l.rollout}</td><td>${l.lanes.map((lane) => html`<span class="chip ${lane === "train" ? "passed" : "open"}">${lane}</span> `)}</td><td class="n">${span(now - l.since)}</td><td class="wide">${l.reason}</td></tr>`)}</tbody></table>` : html`<p class="empty">No sampler was ever lent.</p>`}</section></div>
  <section><h2>Lent and taken back</h2>${events.length ? html`<table class="events"><tbody>${events.map((e) => html`<tr class="${e.level}"><td class="n">${clock(e.time)}</td><td>${e.kind}</td><td class="wide">${e.text}</td></tr>`)}</tbody></table>` : html`<p class="empty">Nothing yet.</p>`}</section>`);
});
