// Pictures in SVG: lines over time, and the buckets of a queue with the cursors in them.

import { h } from "./dom.js";
import { bytes, clock, compact, number } from "./format.js";

const WIDE = 640;
const HIGH = 170;
const LEFT = 66;
const FOOT = 22;

/** A value over time. `points` are {at, value}, the value null if it is not known. Describes itself to screen readers. */
export function lineChart(name, points, format) {
  const known = points.filter((point) => point.value !== null && point.value !== undefined);
  if (known.length < 2) return h("p", { class: "quiet chart-empty" }, `${name}: no samples yet. The silo takes one every few seconds.`);
  const first = points[0].at;
  const span = Math.max(points.at(-1).at - first, 1);
  const top = niceTop(Math.max(...known.map((point) => point.value)));
  const x = (at) => LEFT + ((at - first) / span) * (WIDE - LEFT - 8);
  const y = (value) => 8 + (1 - value / top) * (HIGH - 8 - FOOT);
  const runs = [[]];
  for (const point of points) {
    if (point.value === null || point.value === undefined) runs.push([]);
    else runs.at(-1).push(point);
  }
  const drawn = runs.filter((run) => run.length > 1);
  const line = (run) => run.map((point, index) => `${index ? "L" : "M"}${x(point.at).toFixed(1)} ${y(point.value).toFixed(1)}`).join("");
  const now = known.at(-1).value;
  const highest = Math.max(...known.map((point) => point.value));
  return h("figure", { class: "chart" },
    h("figcaption", null, h("span", null, name), h("strong", null, format(now))),
    h("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": `${name}: now ${format(now)}, highest ${format(highest)}` },
      [0, 0.5, 1].map((share) => h("g", { class: "axis" },
        h("line", { x1: LEFT, x2: WIDE - 8, y1: y(share * top), y2: y(share * top) }),
        h("text", { x: LEFT - 8, y: y(share * top) + 4, "text-anchor": "end" }, format(share * top)))),
      drawn.map((run) => h("path", { class: "area", d: `${line(run)}L${x(run.at(-1).at).toFixed(1)} ${y(0)}L${x(run[0].at).toFixed(1)} ${y(0)}Z` })),
      drawn.map((run) => h("path", { class: "line", d: line(run) })),
      h("g", { class: "axis" },
        h("text", { x: LEFT, y: HIGH - 3 }, clock(first)),
        h("text", { x: WIDE - 8, y: HIGH - 3, "text-anchor": "end" }, clock(points.at(-1).at)))));
}

function niceTop(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => step * power >= value) * power;
}

/** A small line without axes; null if there is nothing to show. */
export function sparkline(values, label) {
  const known = values.filter((value) => value !== null);
  if (known.length < 2) return null;
  const top = Math.max(...known, 1);
  const points = known.map((value, index) => `${((index / (known.length - 1)) * 96 + 2).toFixed(1)},${(22 - (value / top) * 20).toFixed(1)}`);
  return h("svg", { class: "spark", viewBox: "0 0 100 24", role: "img", "aria-label": label, preserveAspectRatio: "none" },
    h("polyline", { points: points.join(" ") }));
}

const SLOTS = 10;
const SLOT = 84;
const TANK = 132;
const MARGIN = 134;

/** The cache of a queue: ten buckets, how full each is, and the subscriptions whose position is in it. */
export function buckets(page) {
  const wide = MARGIN * 2 + SLOTS * SLOT;
  const rows = rowsOf(page.cursors);
  const high = 40 + TANK + 30 + Math.max(...rows.values(), 1) * 24;
  const capacity = Math.max(page.cache.max_events / SLOTS, 1);
  const share = (bucket) => Math.min(Math.max(bucket.events / capacity, (bucket.bytes / Math.max(page.cache.max_bytes, 1)) * SLOTS, 0.04), 1);
  const unread = Math.max(page.end_offset - page.read_offset, 0);
  const drawn = new Map();
  const label = `${page.buckets.length} of ${SLOTS} buckets in use, ${number(page.cache.events)} events cached, ${number(unread)} batches not read yet`;
  return h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Picture of the cache, wider than a small screen" },
    h("svg", { class: "tanks", viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": label },
      h("text", { x: MARGIN - 14, y: 24, "text-anchor": "end", class: "caption" }, "outside the cache"),
      h("text", { x: MARGIN + SLOTS * SLOT + 14, y: 24, class: "caption" }, unread ? "not read yet" : "end of the queue"),
      h("text", { x: MARGIN + SLOTS * SLOT + 14, y: 100, class: "big" }, unread ? compact(unread) : ""),
      Array.from({ length: SLOTS }, (_, index) => h("rect", { class: "slot", x: MARGIN + index * SLOT + 4, y: 36, width: SLOT - 8, height: TANK, rx: 6 })),
      page.buckets.slice(0, SLOTS).map((bucket, index) => h("g", { key: `bucket ${bucket.low}`, class: "bucket", shift: `translateX(${MARGIN + index * SLOT + 4}px)` },
        h("title", null, `batches ${bucket.low} to ${bucket.high}: ${number(bucket.events)} events, ${bytes(bucket.bytes)}, ${bucket.pins} cursors`),
        h("rect", { class: bucket.pins ? "water pinned" : "water", x: 0, y: 36 + TANK * (1 - share(bucket)), width: SLOT - 8, height: TANK * share(bucket), rx: 6 }),
        h("text", { x: (SLOT - 8) / 2, y: 28, "text-anchor": "middle", class: "offset" }, compact(bucket.low)),
        h("text", { x: (SLOT - 8) / 2, y: 36 + TANK - 10, "text-anchor": "middle", class: "amount" }, compact(bucket.events)))),
      page.cursors.map((cursor) => {
        const at = slotOf(page, cursor);
        const row = drawn.get(at) ?? 0;
        drawn.set(at, row + 1);
        const x = at < 0 ? MARGIN - 60 : at >= SLOTS ? MARGIN + SLOTS * SLOT + 54 : MARGIN + at * SLOT + SLOT / 2;
        return h("g", { key: `cursor ${cursor.subscription}`, class: `cursor ${cursor.catching_up ? "late" : ""}`, shift: `translate(${x}px, ${36 + TANK + 8 + row * 24}px)` },
          h("title", null, `${cursor.subscription}: position ${number(cursor.watermark)}, ${cursor.active} streams in the cache, ${cursor.parked} outside`),
          h("path", { d: "M0 0l7 8h-14z" }),
          h("text", { x: 0, y: 20, "text-anchor": "middle" }, cut(cursor.subscription, 13)));
      })));
}

function slotOf(page, cursor) {
  if (cursor.bucket !== null) return Math.min(cursor.bucket, SLOTS - 1);
  return cursor.catching_up || cursor.watermark < page.read_offset ? -1 : SLOTS;
}

function rowsOf(cursors) {
  const rows = new Map();
  for (const cursor of cursors) rows.set(cursor.bucket ?? -1, (rows.get(cursor.bucket ?? -1) ?? 0) + 1);
  return rows;
}

function cut(text, length) {
  return text.length > length ? `${text.slice(0, length - 1)}…` : text;
}
