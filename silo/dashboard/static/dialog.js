// The dialog of the page.

import { h, render } from "./dom.js";

export const dialog = document.getElementById("dialog");

/** Ask before an action that cannot be undone. */
export function confirmed(title, text, verb, act) {
  render(dialog,
    h("h2", { id: "dialog-title" }, title), h("p", null, text),
    h("div", { class: "buttons" },
      h("button", { class: "danger", onclick: () => { dialog.close(); act(); } }, verb),
      h("button", { onclick: () => dialog.close() }, "Cancel")));
  dialog.showModal();
}
