// One queue: its cache as tanks of water, and the subscriptions' positions below them.

import { buckets, lineChart } from "./charts.js";
import { h } from "./dom.js";
import { bytes, compact, counted, duration, number, rate } from "./format.js";
import { badge, link, section, table, tile } from "./parts.js";

const KEPT = 120;

export const queue = {
  live: true,
  title: (options) => `Queue ${options.queue ?? 0}${options.provider ? ` of ${options.provider}` : ""}`,
  draw(data, visit) {
    const row = data.queue ?? { state: "unknown", reason: "" };
    remember(data, visit.state);
    const series = visit.state.series;
    return [
      h("h1", null, `Queue ${data.index}`, h("small", { class: "quiet" }, ` of ${data.provider}`)),
      steps(data),
      h("p", null, badge(row.state), row.reason ? ` ${row.reason}` : "", data.silo ? [" on silo ", link("cluster", {}, data.silo), row.epoch ? `, epoch ${row.epoch}` : ""] : ""),
      h("dl", { class: "tiles" },
        tile("Read", rate(series.at(-1)?.rate ?? null), "events"),
        tile("Cached", compact(data.cache.events), `of ${compact(data.cache.max_events)}`),
        tile("Cache", bytes(data.cache.bytes), `of ${bytes(data.cache.max_bytes)}`, data.cache.pressure ? "odd" : ""),
        tile("Pressure", data.cache.pressure ? "yes" : "no", data.cache.pressure ? "reading waits" : null, data.cache.pressure ? "odd" : ""),
        tile("Lag", row.lag_ms === undefined ? compact(data.end_offset - data.read_offset) : duration(row.lag_ms), row.lag_events ? counted(row.lag_events, "event") : null),
        tile("End", compact(data.end_offset), "batches")),
      section("Cache and positions", buckets(data), h("p", { class: "quiet" }, "The oldest bucket is on the left. It is dropped when no cursor stands in it; buckets in full colour have one. An arrow below a bucket is the position of a subscription.")),
      h("div", { class: "pair" },
        lineChart("Events read", series.map((point) => ({ at: point.at, value: point.rate })), rate),
        lineChart("Events in the cache", series.map((point) => ({ at: point.at, value: point.cached })), compact)),
      section("Positions", table("Positions of subscriptions", [["Subscription"], ["Position", "num"], ["To the end", "num"], ["Where"], ["Streams in the cache", "num"], ["Streams outside", "num"]],
        data.cursors.map((one) => ({
          key: one.subscription,
          cells: [link("subscription", { provider: data.provider, name: one.subscription.split("~")[0] }, one.subscription), number(one.watermark), number(Math.max(data.end_offset - one.watermark, 0)),
            one.bucket !== null ? `bucket ${one.bucket + 1}` : one.catching_up ? "catching up outside the cache" : one.watermark >= data.read_offset ? "at the end" : "outside the cache",
            number(one.active), number(one.parked)],
        })), "No subscription reads this queue here.")),
      section("Buckets", table("Buckets of the cache", [["Bucket"], ["First batch", "num"], ["Last batch", "num"], ["Events", "num"], ["Bytes", "num"], ["Cursors in it", "num"]],
        data.buckets.map((one, index) => ({ key: one.low, cells: [index + 1, number(one.low), number(one.high), number(one.events), bytes(one.bytes), number(one.pins)] })), "The cache is empty.")),
    ];
  },
};

function steps(data) {
  if (data.count < 2) return null;
  const at = (index) => ({ provider: data.provider, queue: (index + data.count) % data.count });
  return h("nav", { class: "steps", "aria-label": "Queues" },
    link("queue", at(data.index - 1), "← Previous"),
    h("span", null, Array.from({ length: Math.min(data.count, 32) }, (_, index) =>
      h("a", { href: `#/queue?${new URLSearchParams(at(index))}`, "aria-current": index === data.index ? "page" : null }, index))),
    link("queue", at(data.index + 1), "Next →"));
}

function remember(data, state) {
  const now = Date.now() * 1000;
  const before = state.before;
  state.series ??= [];
  if (before === undefined || now - before.at > 300_000) {
    const read = before === undefined ? null : Math.max(data.received_events - before.received, 0) / ((now - before.at) / 1e6);
    state.series = [...state.series, { at: now, rate: read, cached: data.cache.events }].slice(-KEPT);
    state.before = { at: now, received: data.received_events };
  }
}
