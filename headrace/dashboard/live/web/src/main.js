// The page: settings, records of the past over HTTP, then live ones; a view per hash. Views draw at most four times a second, and only after a change.
import { follow, open } from "./bus.js";
import { html, put } from "./html.js";
import { apply, state, touch, version } from "./state.js";
import { SILENT_S, header } from "./views/header.js";
import { actors } from "./views/actors.js";
import { behaviour } from "./views/behaviour.js";
import { feedback } from "./views/feedback.js";
import { groups } from "./views/groups.js";
import { ledger } from "./views/ledger.js";
import { letters } from "./views/letters.js";
import { overview } from "./views/overview.js";
import { regions } from "./views/regions.js";
import { scavenger } from "./views/scavenger.js";
import { steps } from "./views/steps.js";
import { trajectories } from "./views/trajectories.js";
import { trajectory } from "./views/trajectory.js";

const VIEWS = {
  overview: ["Overview", overview], steps: ["Steps", steps], actors: ["Actors", actors], groups: ["Groups", groups],
  trajectories: ["Trajectories", trajectories], behaviour: ["Behaviour", behaviour],
  ledger: ["Ledger", ledger], letters: ["Dead letters", letters], regions: ["Regions", regions], feedback: ["Feedback", feedback], scavenger: ["Scavenger", scavenger],
};
const node = (id) => document.getElementById(id);
// The key is in the fragment of the address that `headrace dashboard` prints. It stays in this tab and leaves the address.
const given = /^#key=([\w.-]+)/.exec(location.hash);
if (given) { sessionStorage.setItem("key", given[1]); window.history.replaceState(null, "", location.pathname); }
export const fetchJson = async (path) => {
  const answer = await fetch(path, { headers: { authorization: `Bearer ${sessionStorage.getItem("key")}` }, credentials: "omit" });
  if (!answer.ok) throw new Error((await answer.text()) || answer.statusText);
  return answer.json();
};

let nc, lastStep = 0, drawn = -1, shown = "", cleanup = null;
const count = (what) => { state.counts[what]++; };

async function load() {
  const steps = await fetchJson(`api/steps?after=${lastStep}`);
  lastStep = steps.last;
  for (const record of steps.records) { apply(record); count("read"); }
  window.firstData ??= performance.now();
  const past = await fetchJson("api/history");
  state.users = past.users;
  for (const record of past.records) apply(record);
  state.loaded = true;
  touch();
}

function subscribe() {
  const { run } = state.settings, go = (subject) => follow(nc, subject, apply, count);
  for (const subject of [`hr.step.${run}`, `hr.score.${run}.*.*`, `hr.close.${run}.*`, `hr.ledger.${run}.*`, `hr.fail.${run}.*`, "hr.beat.*.>", "hr.metric.>", "hr.traffic.>"]) go(subject);
  for (const type of ["event", "eval_result", "weights_swapped", "promotion"]) go(`hr.event.${run}.*.${type}`);
}

async function start() {
  state.settings = await fetchJson("config.json");
  document.title = `${state.settings.run} · headrace`;
  nc = await open(state.settings, (what) => {
    if (what === "disconnect") { state.connected = false; state.since = Date.now(); }
    if (what === "reconnect") { state.connected = true; load().catch(fault); }
    touch();
  });
  state.connected = true;
  subscribe();
  await load();
}

function fault(error) {
  state.fault = error.message ?? String(error);
  touch();
}

function draw() {
  const [name, argument] = (location.hash.replace(/^#\//, "") || "overview").split("/");
  const key = `${name}/${argument ?? ""}`;
  put(node("header"), header());
  put(node("nav"), html`${Object.entries(VIEWS).map(([id, [title]]) => html`<a href="#/${id}" class="${id === name || (name === "t" && id === "trajectories") ? "here" : ""}">${title}${badge(id)}</a>`)}`);
  if (key !== shown) {
    cleanup?.();
    node("view").innerHTML = "";
    node("view")._text = undefined;
    shown = key;
    cleanup = null;
    window.scrollTo(0, 0);
  }
  const view = name === "t" ? trajectory : VIEWS[name]?.[1] ?? overview;
  cleanup = view(node("view"), argument) ?? cleanup;
}

function badge(id) {
  if (id === "letters") { const open = [...state.letters.values()].filter((l) => !l.settled).length; return open ? html`<b>${open}</b>` : ""; }
  if (id === "actors") { const dead = [...state.actors.values()].filter((a) => Date.now() / 1000 - a.at > SILENT_S && a.beat.state !== "stopped").length; return dead && !state.finished ? html`<b>${dead}</b>` : ""; }
  return "";
}

setInterval(() => { if (drawn !== version) { drawn = version; draw(); } }, 250);
setInterval(touch, 2000);
window.addEventListener("hashchange", () => { touch(); draw(); });
window.headrace = { state };
start().catch(fault);
