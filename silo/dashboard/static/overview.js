// Overview: is anything stuck?

import { sparkline } from "./charts.js";
import { h } from "./dom.js";
import { bytes, compact, counted, duration, number, rate } from "./format.js";
import { address, badge, kindOf, link, section, table, tile } from "./parts.js";

export const overview = {
  live: true,
  title: () => "Overview",
  draw(data, visit) {
    const { silos, queues, subscriptions, problems } = data;
    return [
      h("h1", null, "Overview"),
      health(problems, data),
      h("dl", { class: "tiles" },
        tile("Silos", `${silos.filter((one) => !["dead", "unreachable"].includes(one.state)).length}`, `of ${silos.length}`),
        tile("Queues served", `${queues.filter((one) => one.state !== "unserved").length}`, `of ${queues.length}`),
        tile("Stored", rate(inflow(queues, visit.state)), "batches"),
        tile("Delivered", rate(sum(subscriptions, "rate")), "events"),
        tile("Oldest event", duration(highest(subscriptions, "lag_ms")), "waiting"),
        tile("Dead letters", number(sum(subscriptions, "dead_letters")), null, sum(subscriptions, "dead_letters") ? "odd" : "")),
      section("Queues", queueStrip(queues)),
      section("Subscriptions", table("Subscriptions, the worst first",
        [["Name"], ["State"], ["Lag", "num"], ["Last minutes"], ["Rate", "num"], ["In flight", "num"], ["Waiting", "num"], ["Paused", "num"], ["Dead letters", "num"], ["Consumers", "num"]],
        [...subscriptions].sort(worstFirst).map(row), "There is no subscription that you may see.")),
    ];
  },
};

function health(problems) {
  if (!problems.length) return h("p", { class: "health good", role: "status" }, h("span", { "aria-hidden": "true" }, "✓ "), "Nothing is stuck.");
  const worst = problems[0].severity;
  return [
    h("p", { class: `health ${worst}`, role: "status" }, h("span", { "aria-hidden": "true" }, worst === "bad" ? "✕ " : "! "), `${counted(problems.length, "thing needs", "things need")} a look.`),
    h("ul", { class: "problems" }, problems.slice(0, 8).map((one) => h("li", { class: one.severity }, link(one.page, one.options, one.text))),
      problems.length > 8 ? h("li", null, `and ${problems.length - 8} more`) : null),
  ];
}

function queueStrip(queues) {
  const providers = [...new Set(queues.map((one) => one.provider))];
  return providers.map((provider) => h("div", { class: "strip", key: provider },
    providers.length > 1 || provider !== "default" ? h("h3", null, provider) : null,
    h("ul", { class: "cells" }, queues.filter((one) => one.provider === provider).map((one) => {
      const full = one.cache_limit_bytes ? Math.min(one.cached_bytes / one.cache_limit_bytes, 1) : 0;
      const label = `queue ${one.index}: ${one.state}${one.reason ? `, ${one.reason}` : ""}; lag ${compact(one.lag_events ?? one.lag_batches)}; cache ${bytes(one.cached_bytes)}`;
      return h("li", { key: `${provider}/${one.index}` }, h("a", { class: `cell ${kindOf(one.state)}`, href: address("queue", { provider, queue: one.index }), title: label, "aria-label": label },
        h("span", { class: "fill", wide: `${Math.round(full * 100)}%` }),
        h("b", null, one.index), h("small", null, one.state), h("small", { class: "quiet" }, one.lag_ms ? duration(one.lag_ms) : one.silo || "no silo")));
    }))));
}

function row(one) {
  return {
    key: `${one.provider}/${one.name}`,
    cells: [
      h("span", null, link("subscription", { provider: one.provider, name: one.name }, h("b", null, one.name)), h("small", { class: "quiet" }, `${one.selector} · ${one.mode}`)),
      h("span", { title: one.reason || null }, badge(one.state), one.reason ? h("small", { class: "quiet clip" }, one.reason) : null),
      h("span", null, lagText(one), h("small", { class: "quiet" }, one.lag_ms ? duration(one.lag_ms) : "")),
      sparkline(one.spark, `lag of ${one.name} over the last minutes`) ?? "",
      rate(one.rate), compact(one.in_flight), compact(one.waiting), compact(one.paused), number(one.dead_letters),
      one.consumer_count ? `${one.connected_count} of ${one.consumer_count}` : "handlers",
    ],
  };
}

function lagText(one) {
  return one.lag_events === null ? `${compact(one.lag_batches)}${one.lag_batches === null ? "" : " batches"}` : compact(one.lag_events);
}

function worstFirst(one, other) {
  const rank = { bad: 0, odd: 1, good: 2 };
  return rank[kindOf(one.state)] - rank[kindOf(other.state)] || (other.lag_ms ?? 0) - (one.lag_ms ?? 0) || one.name.localeCompare(other.name);
}

function inflow(queues, state) {
  if (highest(queues, "end_offset") === null) return null;
  const now = performance.now();
  const end = sum(queues, "end_offset");
  state.ends = [...(state.ends ?? []), [now, end]].slice(-6);
  const [then, before] = state.ends[0];
  return now - then > 500 ? Math.max(end - before, 0) / ((now - then) / 1000) : null;
}

function sum(rows, field) {
  return rows.reduce((total, one) => total + (one[field] ?? 0), 0);
}

function highest(rows, field) {
  const known = rows.map((one) => one[field]).filter((value) => value !== null && value !== undefined);
  return known.length ? Math.max(...known) : null;
}
