// Parts that several pages use.

import { h } from "./dom.js";

const KINDS = {
  bad: ["faulted", "unserved", "dead", "unreachable", "blocked", "held", "not served"],
  odd: ["throttled", "retrying", "paused", "out of credit", "behind", "stopped", "draining", "drained", "unknown", "resuming", "starting", "waiting"],
};
const MARKS = { bad: "✕", odd: "!", good: "✓" };

export function kindOf(state) {
  return KINDS.bad.includes(state) ? "bad" : KINDS.odd.includes(state) ? "odd" : "good";
}

/** A state: its word, with a mark and a colour. */
export function badge(state) {
  const kind = kindOf(state);
  return h("span", { class: `badge ${kind}` }, h("span", { "aria-hidden": "true" }, MARKS[kind]), ` ${state}`);
}

export function link(page, options, ...children) {
  return h("a", { href: address(page, options) }, ...children);
}

export function address(page, options) {
  const query = new URLSearchParams(options ?? {}).toString();
  return `#/${page}${query ? `?${query}` : ""}`;
}

/** A number with its name. */
export function tile(name, value, note, kind = "") {
  return h("div", { class: `tile ${kind}` }, h("dt", null, name), h("dd", null, value, note ? h("small", null, note) : null));
}

/** A table. `columns` are [name, kind]; each row is {key, cells}, or {key, wide} for one cell over all columns. On a phone
 * each row is a card. */
export function table(caption, columns, rows, empty) {
  if (!rows.length) return h("p", { class: "quiet" }, empty);
  return h("div", { class: "table" },
    h("table", null,
      h("caption", { class: "hidden" }, caption),
      h("thead", null, h("tr", null, columns.map(([name, kind]) => h("th", { scope: "col", class: kind ?? null }, name)))),
      h("tbody", null, rows.map((row) => h("tr", { key: row.key, class: row.class ?? null }, row.wide
        ? h("td", { colspan: columns.length }, row.wide)
        : row.cells.map((cell, index) => h("td", { "data-name": columns[index][0], class: columns[index][1] ?? null }, cell)))))));
}

export function section(title, ...children) {
  return h("section", { "aria-label": title }, h("h2", null, title), ...children);
}
