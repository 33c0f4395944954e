// Text into markup. Every value is escaped unless it comes from `html` itself.
const SAFE = Symbol("safe");
const escapes = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
export const escape = (value) => String(value).replace(/[&<>"']/g, (c) => escapes[c]);
const show = (value) => {
  if (value === null || value === undefined || value === false) return "";
  if (Array.isArray(value)) return value.map(show).join("");
  return value[SAFE] !== undefined ? value[SAFE] : escape(value);
};
export const html = (parts, ...values) => ({ [SAFE]: parts.reduce((out, part, i) => out + show(values[i - 1]) + part) });
export const put = (node, content) => {
  const text = show(content);
  if (node.dataset.shown === undefined || node._text !== text) { node.innerHTML = text; node._text = text; node.dataset.shown = ""; }
};

export const number = (value, digits = 2) => (value === null || value === undefined || Number.isNaN(value) ? "–" : value.toFixed(digits));
export const count = (value) => {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  return size >= 1e9 ? `${(value / 1e9).toFixed(1)} G` : size >= 1e6 ? `${(value / 1e6).toFixed(1)} M` : size >= 1e4 ? `${(value / 1e3).toFixed(1)} k` : size >= 100 || Number.isInteger(value) ? value.toFixed(0) : value.toFixed(1);
};
export const percent = (value) => (value === null || value === undefined || Number.isNaN(value) ? "–" : `${(100 * value).toFixed(0)} %`);
export const span = (seconds) => {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  if (seconds < 1) return `${(1000 * seconds).toFixed(0)} ms`;
  if (seconds < 90) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 5400) return `${Math.floor(seconds / 60)} min ${String(Math.floor(seconds % 60)).padStart(2, "0")} s`;
  return `${Math.floor(seconds / 3600)} h ${String(Math.floor((seconds % 3600) / 60)).padStart(2, "0")} min`;
};
// A duration in at most seven characters.
export const brief = (seconds) => (seconds < 90 ? span(seconds) : seconds < 5400 ? `${(seconds / 60).toFixed(1)} min` : `${(seconds / 3600).toFixed(1)} h`);
export const clock = (time) => new Date(time * 1000).toLocaleTimeString([], { hour12: false });
