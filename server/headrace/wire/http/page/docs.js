// The page at "/docs": every route of /openapi.json, with its parameters and responses, and a form to send a request.

import { get, versionPath, written } from "./client.js";
import { element } from "./dom.js";
import { fileTask, pictureType, samplePicture } from "./files.js";
import { anotherKey, askForKey, credentials, keyAccepted } from "./key.js";
import { filledIn, sampleRequest } from "./samples.js";

const MAX_SHOWN = 100_000;
const at = (id) => document.getElementById(id);
let schemas = {};
/** A version that serves, for the fields of the forms: {name, version}, null if there is none. */
let served = null;

/** A schema on a few lines: names, types and what they mean; `seen` are the named ones around it. */
function outline(schema, indent = "", seen = []) {
  if (schema.$ref) {
    const name = schema.$ref.split("/").at(-1);
    return seen.includes(name) ? name : outline(schemas[name] ?? {}, indent, [...seen, name]);
  }
  const choices = schema.anyOf ?? schema.oneOf;
  if (choices) return choices.map((choice) => outline(choice, indent, seen)).join(" or ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return `[${outline(schema.items ?? {}, indent, seen)}, ...]`;
  if (schema.properties) {
    const inner = `${indent}  `;
    const lines = Object.entries(schema.properties).map(([name, of]) => {
      const optional = schema.required?.includes(name) ? "" : "?";
      return `${inner}${name}${optional}: ${outline(of, inner, seen)}${of.description ? `    ${of.description.replaceAll("`", "")}` : ""}`;
    });
    return `{\n${lines.join("\n")}\n${indent}}`;
  }
  if (schema.additionalProperties && typeof schema.additionalProperties === "object") return `{name: ${outline(schema.additionalProperties, indent, seen)}, ...}`;
  return schema.type ?? "anything";
}

/** A text whose parts in back-ticks are code. */
function prose(text) {
  return (text ?? "").split("`").map((part, place) => (place % 2 ? element("code", {}, part) : part));
}

function content(title, of) {
  const parts = Object.entries(of ?? {}).map(([type, { schema }]) => element("pre", {}, `${type}\n${outline(schema ?? {})}`));
  return parts.length ? [element("h4", {}, title), ...parts] : [];
}

function operation(path, method, of) {
  const verb = method.toUpperCase();
  const inside = element("div");
  const details = element("details", { className: "card route" },
    element("summary", {}, element("b", { className: `verb ${method}` }, verb), " ", element("code", {}, path), " ", element("span", { className: "soft" }, ...prose(of.summary))), inside);
  // Made when it is opened: there are many, and few are read.
  details.addEventListener("toggle", () => {
    if (details.open && !inside.hasChildNodes()) inside.append(...described(of), asking(path, verb, of));
  });
  return details;
}

function described(of) {
  const headers = (of.parameters ?? []).filter((each) => each.in === "header");
  const errors = Object.entries(of.responses).filter(([status]) => status !== "200");
  return [
    ...(of.description ? [element("p", {}, ...prose(of.description))] : []),
    ...(headers.length ? [element("h4", {}, "Headers"), element("ul", {}, ...headers.map((each) => element("li", {}, element("code", {}, each.name), " ", ...prose(each.description))))] : []),
    ...content("Takes", of.requestBody?.content),
    ...content("Gives", of.responses["200"]?.content),
    element("h4", {}, "Errors"),
    element("ul", {}, ...errors.map(([status, error]) => element("li", {}, element("b", {}, status), " ", ...prose(error.description)))),
  ];
}

/** A value that fits a schema: its example, else its default, else the smallest value of its type. */
function sampleOf(schema, depth = 0) {
  if (schema.examples?.length) return schema.examples[0];
  if (schema.default !== undefined) return schema.default;
  if (schema.$ref) return depth > 4 ? {} : sampleOf(schemas[schema.$ref.split("/").at(-1)] ?? {}, depth + 1);
  const choice = (schema.anyOf ?? schema.oneOf)?.find((each) => each.type !== "null");
  if (choice) return sampleOf(choice, depth);
  if (schema.enum) return schema.enum[0];
  if (schema.const !== undefined) return schema.const;
  if (schema.properties) return Object.fromEntries((schema.required ?? []).map((name) => [name, sampleOf(schema.properties[name] ?? {}, depth + 1)]));
  return { array: [], object: {}, string: "", boolean: false, integer: 0, number: 0 }[schema.type] ?? {};
}

/** What stands in the field of a name in a path. */
function sampleName({ name, schema }) {
  return { model: served?.name, version: served?.version }[name] ?? String(schema?.examples?.[0] ?? "");
}

/** The body of a request: of a model's inputs for inference, else the route's example. Null for a picture file, which no JSON can hold. */
async function sampleBody(path, content, names) {
  if (path.endsWith("/infer") && names.model) {
    const target = versionPath({ name: names.model, version: names.version });
    const [config, metadata] = await Promise.all([get(`${target}/config`), get(target)]);
    return (await fileTask(config, metadata))?.picture ? null : sampleRequest(metadata);
  }
  return JSON.stringify(content.example ?? sampleOf(content.schema ?? {}), null, 1);
}

/** A form that sends a request to the route, with a field for each name in its path. */
function asking(path, verb, of) {
  const parameters = (of.parameters ?? []).filter((each) => each.in === "path");
  const fields = parameters.map((each) => [each.name, element("input", { type: "search", placeholder: each.name, value: sampleName(each), "aria-label": each.name })]);
  const body = of.requestBody ? element("textarea", { rows: 5, spellcheck: false, "aria-label": "body" }) : null;
  const picture = element("input", { type: "file", accept: "image/*" });
  const chooser = element("label", { hidden: true }, "The body is a picture file; without one a sample is sent: ", picture);
  const answer = element("pre", { hidden: true });
  const fill = async () => {
    const names = Object.fromEntries(fields.map(([name, field]) => [name, field.value]));
    const sample = await sampleBody(path, of.requestBody.content["application/json"] ?? {}, names).catch(() => body.value || "{}");
    chooser.hidden = sample !== null;
    body.hidden = sample === null;
    body.value = sample ?? "";
  };
  if (body) {
    void fill();
    for (const [, field] of fields) field.addEventListener("change", () => void fill());
  }
  const sent = async () => {
    if (!body) return {};
    const file = chooser.hidden ? null : (picture.files[0] ?? (await samplePicture()));
    const type = file ? pictureType(file) : "application/json";
    return { body: file ?? filledIn(body.value), headers: { "content-type": type, ...credentials() } };
  };
  const send = async () => {
    const target = fields.reduce((all, [name, field]) => all.replace(`{${name}}`, encodeURIComponent(field.value)), path).slice(1);
    answer.hidden = false;
    try {
      const response = await fetch(target, { method: verb, headers: credentials(), ...(await sent()) });
      const text = await response.text();
      answer.textContent = `${response.status}\n${pretty(text)}`;
    } catch (error) {
      answer.textContent = error.message;
    }
  };
  const button = element("button", { type: "button", onclick: () => void send() }, "Send request");
  return element("div", { className: "asking" }, ...fields.map(([, field]) => field), body, body && chooser, button, answer);
}

function pretty(text) {
  const shown = text.slice(0, MAX_SHOWN);
  try {
    return written(JSON.parse(shown));
  } catch {
    return shown;
  }
}

function filter() {
  const filterText = at("filter").value.trim().toLowerCase();
  for (const section of at("routes").children) {
    let found = 0;
    for (const route of section.querySelectorAll(".route")) {
      route.hidden = !route.textContent.toLowerCase().includes(filterText);
      found += route.hidden ? 0 : 1;
    }
    section.hidden = found === 0;
  }
}

/** The document, once the key allows it. */
async function read() {
  for (;;) {
    try {
      const page = await get("openapi.json");
      keyAccepted();
      return page;
    } catch (error) {
      if (error.status !== 401 && error.status !== 403) throw error;
      askForKey(error.message);
      await anotherKey();
    }
  }
}

async function start() {
  const page = await read();
  // A key that may not read the models leaves the fields empty.
  const status = await get("v2/status").catch(() => null);
  served = status?.models.find((model) => model.serving) ?? null;
  schemas = page.components.schemas;
  at("version").textContent = page.info.version;
  at("summary").textContent = page.info.summary;
  const routes = Object.entries(page.paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, of]) => [path, method, of]));
  at("routes").append(...page.tags.map((tag) => element("section", {},
    element("h2", {}, tag.name, " ", element("small", {}, ...prose(tag.description))),
    ...routes.filter(([, , of]) => of.tags.includes(tag.name)).map((route) => operation(...route)))));
  at("filter").addEventListener("input", filter);
}

start().catch((error) => {
  at("summary").textContent = error.message;
});
