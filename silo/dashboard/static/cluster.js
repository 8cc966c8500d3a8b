// The cluster: silos, the owners of all queues, and the history of moves.

import { h } from "./dom.js";
import { duration, number, time } from "./format.js";
import { address, badge, kindOf, section, table } from "./parts.js";

export const cluster = {
  live: true,
  title: () => "Cluster",
  draw(data) {
    return [
      h("h1", null, "Cluster"),
      section("Silos", table("Silos", [["Silo"], ["State"], ["Queues", "num"], ["Address"], ["Last heartbeat", "num"], ["Version"]],
        data.silos.map((one) => ({ key: one.name, cells: [h("b", null, one.name), badge(one.state), number(one.queues), h("span", { class: "mono" }, one.address || "no gRPC"), duration(one.silent_ms), one.version] })), "No silo answers.")),
      section("Owners of the queues", owners(data)),
      section("Moves", table("Moves of queues, the latest first", [["Time (UTC)"], ["Queue"], ["From"], ["To"], ["Epoch", "num"], ["Reason"]],
        data.moves.map((one) => ({
          key: `${one.provider}/${one.queue} ${one.epoch} ${one.to}`,
          cells: [time(one.at_us), h("a", { href: address("queue", { provider: one.provider, queue: one.queue }) }, `${one.provider}/${one.queue}`), one.from || "–", one.to || badge("unserved"), number(one.epoch), one.reason],
        })), data.silos.length > 1 ? "No queue has moved since the silos began." : "A silo by itself has all queues: there are no moves.")),
    ];
  },
};

function owners({ silos, queues }) {
  const providers = [...new Set(queues.map((one) => one.provider))];
  const rows = [...silos.map((one) => one.name), ...(queues.some((one) => !one.silo) ? [""] : [])];
  return providers.map((provider) => {
    const own = queues.filter((one) => one.provider === provider);
    return h("div", { class: "table matrix", key: provider }, h("table", null,
      h("caption", null, `Provider ${provider}`),
      h("tbody", null, rows.map((silo) => {
        const held = own.filter((one) => one.silo === silo);
        return h("tr", { key: silo }, h("th", { scope: "row" }, silo || "no silo"),
          h("td", { class: "num" }, number(held.length)),
          h("td", null, h("ul", { class: "chips" }, held.map((one) =>
            h("li", { key: one.index }, h("a", { class: `chip ${kindOf(one.state)}`, href: address("queue", { provider, queue: one.index }), title: `${one.state}${one.reason ? `: ${one.reason}` : ""}`, "aria-label": `queue ${one.index}, ${one.state}` }, one.index))))));
      }))));
  });
}
