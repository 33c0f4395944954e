// Messages that a consumer gave up, with the reason and the command that sends them again.
import { clock, html, put } from "../html.js";
import { state } from "../state.js";

export function letters(view) {
  const all = [...state.letters.values()].sort((a, b) => b.time - a.time);
  put(view, html`${all.length ? html`<table class="rows"><thead><tr><th class="n">when</th><th>message</th><th>consumer</th><th>reason</th><th>state</th><th>send it again</th></tr></thead><tbody>${all.map((l) => html`<tr><td class="n">${clock(l.time)}</td><td><span class="mono">${l.subject}</span><br><span class="soft">${l.stream_type ?? l.kind ?? ""} #${l.stream_seq}</span></td><td>${l.consumer}</td><td class="wide">${l.reason}</td><td>${l.settled ?? html`<span class="chip failed">open</span>`}</td><td class="mono">${l.command ?? ""}</td></tr>`)}</tbody></table>` : html`<p class="empty">No message was given up.</p>`}
  <p class="note">The list is read when the page loads. A letter holds the message's content, so it comes through the dashboard's process, without users' messages${state.users ? "; your token shows them too" : ""}. <code>headrace dlq ${state.settings.run}</code></p>`);
}
