// A view of data that the page's process reads from the streams: asked for while the view is open, drawn with every change.
import { html, put } from "../html.js";
import { fetchJson } from "../main.js";
import { touch } from "../state.js";

const EVERY_MS = 3000;

export function panel(ask, draw) {
  let found = null, fault = "", timer = null;
  const read = () => ask(found).then((answer) => { found = answer; fault = ""; }, (error) => { fault = error.message; }).finally(touch);
  return (view) => {
    if (found) draw(view, found, fault);
    else put(view, html`<p class="empty ${fault ? "bad" : ""}">${fault || "Loading …"}</p>`);
    if (timer) return undefined;
    read();
    timer = setInterval(read, EVERY_MS);
    return () => { clearInterval(timer); timer = null; };
  };
}

export const asked = (name) => () => fetchJson(`api/panel/${name}`);
export const failed = (fault) => (fault ? html`<p class="note bad">Not up to date: ${fault}</p>` : "");
