// One stream: why its next event is not delivered, for each subscription.

import { h } from "./dom.js";
import { address, link, section } from "./parts.js";

export const stream = {
  live: false,
  title: (options) => options.stream ? `Stream ${options.stream}` : "Why is an event not delivered?",
  draw(data, visit) {
    const { provider, providers } = data;
    const { options } = visit;
    return [
      h("h1", null, stream.title(options)),
      h("form", { class: "filter", role: "search", onsubmit: (event) => { event.preventDefault(); search(event.target.elements); } },
        providers.length > 1 ? h("label", null, "Provider", h("select", { name: "provider" }, providers.map((one) => h("option", { value: one, selected: one === provider }, one)))) : h("input", { type: "hidden", name: "provider", value: provider }),
        h("label", { class: "grow" }, "Stream", h("input", { name: "stream", value: options.stream ?? "", placeholder: "namespace/key", required: true, spellcheck: "false" })),
        h("label", null, "Subscription", h("input", { name: "subscription", value: options.subscription ?? "", placeholder: "all that match", spellcheck: "false" })),
        h("button", { class: "primary", type: "submit" }, "Why?"), options.stream ? h("button", { type: "button", onclick: () => visit.load() }, "Look again") : null),
      data.explanations.map((one) => section(one.subscription ? `Subscription ${one.subscription}` : "No subscription",
        one.subscription ? h("p", null, link("subscription", { provider, name: one.subscription }, "Open the subscription")) : null,
        h("ol", { class: "causes" }, one.causes.map((cause) => h("li", { key: cause.code },
          h("p", null, h("b", null, cause.meaning), " ", h("code", null, cause.code)),
          cause.evidence ? h("p", { class: "mono" }, cause.evidence) : null,
          h("p", { class: "quiet" }, cause.remedy)))))),
    ];
  },
};

function search(fields) {
  const options = { provider: fields.provider.value, stream: fields.stream.value.trim() };
  const subscription = fields.subscription.value.trim();
  location.hash = address("stream", subscription ? { ...options, subscription } : options);
}
