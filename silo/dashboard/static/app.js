// The frame of the dashboard: addresses, live pages, login and theme.

import { post, read, Refused } from "./api.js";
import { dialog } from "./dialog.js";
import { h, render } from "./dom.js";
import { address } from "./parts.js";
import { cluster } from "./cluster.js";
import { deadletters } from "./deadletters.js";
import { overview } from "./overview.js";
import { queue } from "./queue.js";
import { stream } from "./stream.js";
import { subscription } from "./subscription.js";

const PAGES = { overview, queue, subscription, stream, deadletters, cluster };
const MENU = [["overview", "Overview"], ["queue", "Queues"], ["stream", "Why"], ["deadletters", "Dead letters"], ["cluster", "Cluster"]];
const AGAIN_MS = 3000;

const header = document.getElementById("header");
const notice = document.getElementById("notice");
const main = document.getElementById("main");

let session = null;
let open = null;

/** One visit of a page. `data` is what the silo said last, `state` what the page remembers between frames. */
class Visit {
  constructor(name, options) {
    this.name = name;
    this.page = PAGES[name];
    this.options = options;
    this.state = {};
    this.data = null;
    this.source = null;
    this.timer = null;
  }

  get session() {
    return session;
  }

  start() {
    if (this.page.live) this.listen();
    else this.load();
  }

  stop() {
    this.source?.close();
    this.source = null;
    clearTimeout(this.timer);
  }

  listen() {
    this.source = new EventSource(`api/live/${this.name}?${new URLSearchParams(this.options)}`);
    this.source.addEventListener("page", (event) => this.show(JSON.parse(event.data)));
    this.source.addEventListener("refused", (event) => {
      this.stop();
      this.fail(new Refused(JSON.parse(event.data)));
    });
    this.source.onerror = () => {
      if (this.source?.readyState === EventSource.CLOSED) this.load();
      else say("The connection to the silo is lost. It is tried again.", "bad");
    };
  }

  async load() {
    this.stop();
    try {
      this.show(await read(`page/${this.name}`, this.options));
      if (this.page.live) this.again();
    } catch (error) {
      this.fail(error);
    }
  }

  /** Send an action, and show its result. */
  async act(action, options, done) {
    try {
      const { count } = await post(`action/${action}`, options);
      say(done(count), "good");
      await this.load();
    } catch (error) {
      say(error.message, "bad");
    }
  }

  show(data) {
    if (open !== this) return;
    this.data = data;
    if (notice.dataset.kind === "bad") say("");
    this.draw();
  }

  draw() {
    if (open === this && this.data !== null) render(main, this.page.draw(this.data, this));
  }

  fail(error) {
    if (open !== this) return;
    if (error.code === "unauthenticated") {
      logIn(error.message);
      return;
    }
    say(error.message, "bad");
    if (error.code === "not_found" || error.code === "invalid_argument" || error.code === "permission_denied") {
      render(main, h("h1", null, this.page.title(this.options)), h("p", { class: "quiet" }, error.message));
    } else {
      this.again();
    }
  }

  again() {
    this.timer = setTimeout(() => this.page.live ? (this.stop(), this.listen()) : this.load(), AGAIN_MS);
  }
}

function say(text, kind = "") {
  notice.dataset.kind = kind;
  render(notice, text ? h("p", null, text, " ", h("button", { class: "plain", onclick: () => say("") }, "Dismiss")) : []);
}

function visit() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const name = path in PAGES ? path : "overview";
  const before = open;
  const moved = before?.name !== name;
  before?.stop();
  open = new Visit(name, Object.fromEntries(new URLSearchParams(query ?? "")));
  const title = open.page.title(open.options);
  document.title = `${title} – headrace`;
  if (moved) render(main, h("h1", null, title), h("p", { class: "quiet" }, "Loading…"));
  drawHeader();
  if (moved && before) main.focus({ preventScroll: true });
  if (!document.hidden) open.start();
}

// ---- header, theme and login ----------------------------------------------------------------------------------------

function drawHeader() {
  const theme = document.documentElement.dataset.theme ?? "auto";
  render(header,
    h("a", { class: "brand", href: address("overview") }, h("img", { src: "static/icon.svg", alt: "", width: 24, height: 24 }), "headrace"),
    h("nav", { "aria-label": "Pages" }, MENU.map(([name, text]) =>
      h("a", { href: address(name), "aria-current": open?.name === name ? "page" : null }, text))),
    h("div", { class: "tools" },
      session?.silo ? h("span", { class: "quiet silo", title: `silo ${session.silo}, version ${session.version}` }, session.silo) : null,
      h("label", { class: "theme" }, h("span", { class: "hidden" }, "Theme"),
        h("select", { onchange: (event) => setTheme(event.target.value) },
          ["auto", "light", "dark"].map((name) => h("option", { value: name, selected: name === theme }, name)))),
      session === null ? null : session.logged_in
        ? h("button", { onclick: logOut }, `Log out${session.name ? ` ${session.name}` : ""}`)
        : h("button", { onclick: () => logIn("") }, "Log in")));
}

function setTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  try {
    localStorage.setItem("headrace.theme", name);
  } catch {
    // Private windows may refuse: the choice holds until the page is closed.
  }
  drawHeader();
}

function logIn(why) {
  const failed = h("p", { class: "error", role: "alert" }, why);
  const form = (message) => h("form", { onsubmit: (event) => { event.preventDefault(); send(event.target.elements.token.value); } },
    h("h2", { id: "dialog-title" }, "Log in"),
    h("p", null, "With a token of ", h("code", null, "headrace tokens create"), ". The page shows what the token allows."),
    message,
    h("label", null, "Token", h("input", { name: "token", type: "password", autocomplete: "off", required: true, spellcheck: "false" })),
    h("div", { class: "buttons" },
      h("button", { class: "primary", type: "submit" }, "Log in"),
      session ? h("button", { type: "button", onclick: () => dialog.close() }, "Cancel") : null));
  const send = async (token) => {
    try {
      await post("login", { token });
      dialog.close();
      await begin();
    } catch (error) {
      render(dialog, form(h("p", { class: "error", role: "alert" }, error.message)));
    }
  };
  render(dialog, form(why ? failed : null));
  if (!dialog.open) dialog.showModal();
}

async function logOut() {
  await post("logout", {});
  await begin();
}

async function begin() {
  try {
    session = await read("session", {});
    say("");
    visit();
  } catch (error) {
    session = null;
    drawHeader();
    if (error.code === "unauthenticated") logIn("");
    else {
      say(error.message, "bad");
      setTimeout(begin, AGAIN_MS);
    }
  }
}

try {
  const stored = localStorage.getItem("headrace.theme");
  if (stored === "light" || stored === "dark") document.documentElement.dataset.theme = stored;
} catch {
  // The theme of the system.
}
addEventListener("hashchange", visit);
document.querySelector(".skip").onclick = (event) => {
  event.preventDefault(); // the address says which page is open
  main.focus();
};
// A hidden page costs the silo nothing.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) open?.stop();
  else if (session) open?.start();
});
drawHeader();
begin();
