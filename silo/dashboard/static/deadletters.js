// Dead letters: browse, filter, look into the payload, redrive and discard.

import { read } from "./api.js";
import { confirmed } from "./dialog.js";
import { h } from "./dom.js";
import { bytes, counted, number, streamName, time } from "./format.js";
import { address, badge, link, table } from "./parts.js";
import { decode } from "./payload.js";

export const deadletters = {
  live: false,
  title: () => "Dead letters",
  draw(data, visit) {
    const { state, options } = visit;
    state.letters ??= data.letters;
    if (state.first !== data) Object.assign(state, { first: data, letters: data.letters, next: data.next, chosen: new Set() });
    const letters = state.letters;
    const may = visit.session?.may_manage;
    const chosen = letters.filter((one) => state.chosen.has(one.id));
    const provider = data.provider;
    const filter = { provider, subscription: options.subscription ?? "", text: options.text ?? "" };
    const every = `${filter.subscription ? `of ${filter.subscription}` : "of all subscriptions"}${filter.text ? ` that contain “${filter.text}”` : ""}`;
    return [
      h("h1", null, "Dead letters"),
      h("form", { class: "filter", role: "search", onsubmit: (event) => { event.preventDefault(); search(event.target.elements); } },
        data.providers.length > 1 ? h("label", null, "Provider", h("select", { name: "provider" }, data.providers.map((one) => h("option", { value: one, selected: one === provider }, one)))) : h("input", { type: "hidden", name: "provider", value: provider }),
        h("label", null, "Subscription", h("input", { name: "subscription", value: filter.subscription, placeholder: "all", spellcheck: "false" })),
        may ? h("label", { class: "grow" }, "Contains", h("input", { name: "text", type: "search", value: filter.text, placeholder: "in the stream, the reason or the payload", spellcheck: "false" })) : null,
        h("button", { type: "submit" }, "Filter"), h("button", { type: "button", onclick: () => visit.load() }, "Refresh")),
      may ? h("div", { class: "bulk", role: "group", "aria-label": "Actions" },
        h("label", { class: "check" }, h("input", { type: "checkbox", checked: letters.length > 0 && chosen.length === letters.length, disabled: !letters.length, onchange: (event) => { state.chosen = new Set(event.target.checked ? letters.map((one) => one.id) : []); visit.draw(); } }), chosen.length ? `${counted(chosen.length, "letter")} chosen` : "Choose all shown"),
        h("button", { class: "primary", disabled: !chosen.length, onclick: () => visit.act("redrive", { provider, ids: byName(chosen) }, redriven) }, "Redrive"),
        h("button", { class: "danger", disabled: !chosen.length, onclick: () => confirmed("Discard dead letters?", `${counted(chosen.length, "event")} will be deleted. They cannot be redriven any more.`, "Discard", () => visit.act("discard", { provider, ids: byName(chosen) }, discarded)) }, "Discard"),
        h("span", { class: "gap" }),
        h("button", { disabled: !letters.length, onclick: () => confirmed("Redrive all?", `All dead letters ${every} will be delivered once more.`, "Redrive all", () => visit.act("redrive", filter, redriven)) }, "Redrive all that match"),
        h("button", { disabled: !letters.length, onclick: () => confirmed("Discard all?", `All dead letters ${every} will be deleted. They cannot be redriven any more.`, "Discard all", () => visit.act("discard", filter, discarded)) }, "Discard all that match"))
        : h("p", { class: "quiet" }, "Log in with a token that may manage, to see payloads, redrive and discard."),
      table("Dead letters, the oldest first", [[""], ["Id", "num"], ["Subscription"], ["Stream"], ["Reason"], ["Attempts", "num"], ["Given up (UTC)"], ["Size", "num"], [""]],
        letters.flatMap((one) => rows(one, visit, may)), "There are no dead letters."),
      state.next ? h("p", null, h("button", { onclick: () => more(visit) }, "Load more")) : null,
    ];
  },
};

function rows(one, visit, may) {
  const { state } = visit;
  const open = state.open === one.id;
  const toggle = () => { state.open = open ? null : one.id; visit.draw(); };
  const row = {
    key: one.id, class: open ? "opened" : null,
    cells: [
      may ? h("input", { type: "checkbox", "aria-label": `choose ${one.id}`, checked: state.chosen.has(one.id), onchange: (event) => { if (event.target.checked) state.chosen.add(one.id); else state.chosen.delete(one.id); visit.draw(); } }) : "",
      number(one.id),
      link("subscription", { provider: visit.data.provider, name: one.subscription }, one.subscription),
      h("span", { class: "mono" }, streamName(one.stream)), h("span", { class: "wrap" }, one.reason, one.redrive ? [" ", badge("resuming")] : ""),
      number(one.attempts), time(one.failed_at_us), bytes(one.bytes),
      h("button", { class: "plain", "aria-expanded": open ? "true" : "false", "aria-label": `${open ? "hide" : "show"} ${one.id}`, onclick: toggle }, open ? "Hide" : "Show"),
    ],
  };
  return open ? [row, { key: `${one.id} detail`, class: "detail", wide: detail(one, visit) }] : [row];
}

function detail(one, visit) {
  const { state } = visit;
  const facts = [["Event", `queue ${one.queue}, ${one.offset}.${one.index}`], ["Published", `${time(one.timestamp_us)} UTC`]];
  if (one.event_id) facts.push(["Id", one.event_id]);
  for (const [name, value] of Object.entries(one.headers ?? {})) facts.push([`Header ${name}`, value]);
  const shown = one.payload === undefined ? null : decode(one.payload);
  const form = shown === null ? null : state.form && state.form in shown ? state.form : Object.keys(shown)[0];
  return h("div", { class: "letter" },
    h("dl", { class: "facts" }, facts.map(([name, value]) => [h("dt", null, name), h("dd", { class: "mono" }, value)])),
    shown === null ? h("p", { class: "quiet" }, "The payload is shown to viewers that may manage.") : [
      h("div", { class: "tabs", role: "group", "aria-label": "Show the payload as" }, Object.keys(shown).map((name) =>
        h("button", { "aria-pressed": name === form ? "true" : "false", onclick: () => { state.form = name; visit.draw(); } }, name))),
      h("pre", { tabindex: 0, "aria-label": `payload as ${form}` }, shown[form])]);
}

async function more(visit) {
  const { state, options } = visit;
  const page = await read("page/deadletters", { ...options, after: state.next });
  state.letters = [...state.letters, ...page.letters];
  state.next = page.next;
  visit.draw();
}

function search(fields) {
  location.hash = address("deadletters", { provider: fields.provider.value, subscription: fields.subscription.value.trim(), text: fields.text?.value ?? "" });
}

function byName(letters) {
  const ids = {};
  for (const one of letters) (ids[one.subscription] ??= []).push(one.id);
  return ids;
}

function redriven(count) {
  return `${counted(count, "event")} will be delivered once more.`;
}

function discarded(count) {
  return `${counted(count, "dead letter")} discarded.`;
}
