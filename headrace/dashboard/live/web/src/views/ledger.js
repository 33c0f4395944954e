// Where every issued slot of the train lane is: trained, dropped and why, or in flight. The three add up.
import { html, put } from "../html.js";
import { state } from "../state.js";
import { bars } from "./chart.js";

export function sums() {
  const out = { issued: 0, trained: 0, flight: 0, dropped: new Map(), lost: new Map() };
  const drop = (why, n = 1) => out.dropped.set(why, (out.dropped.get(why) ?? 0) + n);
  for (const g of state.groups.values()) {
    if (g.lane !== "train") continue;
    out.issued += g.slots.size;
    for (const s of g.slots.values()) for (const l of s.lost) out.lost.set(l.reason, (out.lost.get(l.reason) ?? 0) + 1);
    for (const s of g.slots.keys()) {
      const why = g.dropped?.[s];
      if (g.fate === "dropped") drop(g.why || "group dropped");
      else if (why) drop(why);
      else if (g.fate === "trained") out.trained++;
      else out.flight++;
    }
  }
  return out;
}

export function ledger(view) {
  const n = sums(), dropped = [...n.dropped.values()].reduce((a, b) => a + b, 0);
  const open = [...state.groups.values()].filter((g) => g.lane === "train" && g.fate === "open").length;
  put(view, html`<div class="equation"><div><b>${n.issued}</b><span>issued</span></div><i>=</i><div class="pass"><b>${n.trained}</b><span>trained</span></div><i>+</i><div class="fail"><b>${dropped}</b><span>dropped</span></div><i>+</i><div><b>${n.flight}</b><span>in flight</span></div></div>
  <p class="note">Slots of the train lane, from the ledger's stream. <code>headrace audit ${state.settings.run}</code> proves the same from every stream.</p>
  <div class="columns"><section><h2>Dropped, by reason</h2>${n.dropped.size ? bars([...n.dropped].sort((a, b) => b[1] - a[1])) : html`<p class="empty">Nothing was dropped.</p>`}</section>
  <section><h2>Lost attempts, by reason</h2>${n.lost.size ? bars([...n.lost].sort((a, b) => b[1] - a[1]), { mark: "A lost attempt is issued again and enters no baseline." }) : html`<p class="empty">No attempt was lost.</p>`}</section></div>
  <section><h2>Failed steps</h2>${state.failed.size ? html`<table><thead><tr><th class="n">step</th><th>reason</th><th>command that repeats it</th></tr></thead><tbody>${[...state.failed.values()].map((f) => html`<tr><td class="n">${f.step}</td><td>${f.reason} <span class="soft">${f.detail ?? ""}</span></td><td class="mono">${f.command ?? ""}</td></tr>`)}</tbody></table>` : html`<p class="empty">None.</p>`}</section>
  <p class="note">${open} groups are open.</p>`);
}
