// One subscription: its lag over the last minutes, its consumers, and the streams that are blocked.

import { lineChart } from "./charts.js";
import { h } from "./dom.js";
import { bytes, compact, counted, duration, number, rate, streamName, streamText } from "./format.js";
import { badge, link, section, table, tile } from "./parts.js";

export const subscription = {
  live: true,
  title: (options) => `Subscription ${options.name ?? ""}`,
  draw(data, visit) {
    const over = (field) => data.series.map((point) => ({ at: point.at_us, value: point[field] }));
    const provider = data.provider;
    return [
      h("h1", null, data.name, h("small", { class: "quiet" }, ` ${data.selector}`)),
      h("p", null, badge(data.state), data.reason ? ` ${data.reason}` : ""),
      h("dl", { class: "tiles" },
        tile("Lag", data.lag_events === null ? compact(data.lag_batches) : compact(data.lag_events), data.lag_events === null ? "batches to the end" : "events to the end"),
        tile("Oldest event", duration(data.lag_ms), "waiting"),
        tile("Delivered", rate(data.rate), `${compact(data.delivered_events)} events`),
        tile("In flight", compact(data.in_flight), `${compact(data.ready)} streams ready`),
        tile("Blocked", compact(data.waiting + data.paused), `${counted(data.retries, "retry", "retries")}`, data.waiting + data.paused ? "odd" : ""),
        tile("Dead letters", link("deadletters", { provider, subscription: data.name }, number(data.dead_letters)), data.gaps ? counted(data.gaps, "gap") : null, data.dead_letters ? "odd" : "")),
      h("div", { class: "pair" },
        lineChart("Events from the first unfinished one on", over("events"), compact),
        lineChart("Age of the oldest event", over("age_ms"), duration),
        lineChart("Events delivered", over("rate"), rate)),
      section("Consumers", table("Consumers and their credit", [["Consumer"], ["Silo"], ["State"], ["Credit", "num"], ["Bytes of credit", "num"], ["In flight", "num"], ["Queues"]],
        [...data.consumers].sort((one, other) => one.credit_events - other.credit_events).map((one) => ({
          key: `${one.silo} ${one.id}`,
          cells: [h("span", { class: "mono" }, one.id), one.silo, badge(one.connected ? (one.blocked ? "blocked" : "connected") : "disconnected"), compact(one.credit_events), bytes(one.credit_bytes), compact(one.in_flight_events),
            one.queues.length ? one.queues.join(", ") : one.blocked || "all"],
        })), data.state === "not served" ? "No consumer is attached, and no silo has a handler for it." : "A handler in the silo consumes.")),
      section("Blocked streams", table("Streams that wait for their next attempt, or are paused", [["Stream"], ["State"], ["Reason"], ["Attempts", "num"], ["Next attempt", "num"], ["Event"], [""]],
        data.blocked.map((one) => ({
          key: streamName(one.stream),
          cells: [h("span", { class: "mono" }, streamName(one.stream)), badge(one.state), h("span", { class: "wrap" }, one.reason), number(one.attempts), one.state === "paused" ? "when resumed" : duration(one.next_in_ms),
            h("span", { class: "mono" }, one.offset === undefined ? `queue ${one.queue}` : `${one.queue}:${one.offset}.${one.index}`),
            one.state === "paused" && visit.session?.may_manage
              ? h("button", { onclick: () => visit.act("resume", { provider, subscription: data.name, namespace: one.stream.namespace, key: one.stream.key }, (count) => count ? `Stream ${streamName(one.stream)} goes on.` : "The stream was not paused any more.") }, "Resume")
              : link("stream", { provider, stream: streamText(one.stream), subscription: data.name }, "Why?")],
        })), "No stream waits for another attempt, and none is paused."),
        data.blocked_total > data.blocked.length ? h("p", { class: "quiet" }, `and ${number(data.blocked_total - data.blocked.length)} more`) : null),
      section("Queues", table("Positions by queue", [["Queue", "num"], ["Position", "num"], ["To the end", "num"], ["Streams behind", "num"], ["Paused", "num"], ["Fault"]],
        data.progress.map((one) => ({
          key: one.queue,
          cells: [link("queue", { provider, queue: one.queue }, one.queue), number(one.watermark), number(Math.max(one.end_offset - one.watermark, 0)), number(one.behind), number(one.paused), one.fault || "none"],
        })), "It has no position yet."),
        h("p", { class: "quiet" }, `Mode ${data.mode}; after the last attempt: ${data.on_failure}. Served by ${data.silos.map((one) => `${one.silo} (${counted(one.queues, "queue")})`).join(", ") || "no silo"}.`)),
    ];
  },
};
