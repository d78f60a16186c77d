// The key of the visitor: kept in sessionStorage, so until this tab is closed, and asked for when the server wants one.

import { element } from "./dom.js";

const STORED = "headrace-key";
let key = read();
let changed = () => {};

function read() {
  try {
    return sessionStorage.getItem(STORED) ?? "";
  } catch {
    return ""; // storage is switched off: the key lasts until the page is left
  }
}

function use(text) {
  key = text.trim();
  try {
    if (key) sessionStorage.setItem(STORED, key);
    else sessionStorage.removeItem(STORED);
  } catch {
    // As above.
  }
  changed();
}

/** The header that carries the key; none without a key. */
export function credentials() {
  return key ? { authorization: `Bearer ${key}` } : {};
}

const field = element("input", { type: "password", id: "key", autocomplete: "off", spellcheck: false, placeholder: "hr_…" });
const reason = element("p", { className: "error" });
const submit = element("button", { type: "submit" }, "Use key");
const forget = element("button", { type: "button", onclick: () => use("") }, "Forget key");
const form = element("form", { className: "card", id: "key-form", hidden: true },
  element("h2", {}, "Key"), reason,
  element("label", { for: "key" }, "A key of this server, as `headrace keys new` shows it. It is kept until this tab is closed."), field, submit, " ", forget);
form.addEventListener("submit", (event) => {
  event.preventDefault();
  use(field.value);
  field.value = "";
});
document.querySelector("header.top").after(form);

/** Show the form with the server's reason. */
export function askForKey(message) {
  reason.textContent = message;
  forget.hidden = !key;
  if (!form.hidden) return;
  form.hidden = false;
  field.focus();
}

/** Hide the form: the key is accepted. */
export function keyAccepted() {
  form.hidden = true;
}

/** Wait until another key is used, or none. */
export function anotherKey() {
  return new Promise((resolve) => {
    changed = resolve;
  });
}

// A link cannot carry the key: what it names is fetched, and shown as text.
document.addEventListener("click", async (event) => {
  const link = event.target.closest?.('a[href="openapi.json"], a[href="metrics"]');
  if (!link || !key) return;
  event.preventDefault();
  const response = await fetch(link.href, { headers: credentials(), cache: "no-store" });
  const text = await response.text();
  location.assign(URL.createObjectURL(new Blob([text], { type: "text/plain; charset=utf-8" })));
});
