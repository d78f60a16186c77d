// Asking the server. Paths are relative, so that the pages work behind a proxy that puts a prefix before them.

import { credentials } from "./key.js";

/** A JSON answer; an error says what the server says. */
export async function get(path) {
  return parsed(await fetch(path, { headers: { accept: "application/json", ...credentials() }, cache: "no-store" }));
}

/** Where a version of a model is. */
export function versionPath(model) {
  const version = model.version ? `/versions/${encodeURIComponent(model.version)}` : "";
  return `v2/models/${encodeURIComponent(model.name)}${version}`;
}

/** Run a request: `tensor` is one input as {shape, datatype, bytes}, `outputs` as the protocol's JSON has them. */
export async function infer(model, name, tensor, outputs) {
  const input = { name, shape: tensor.shape, datatype: tensor.datatype, parameters: { binary_data_size: tensor.bytes.byteLength } };
  const header = new TextEncoder().encode(JSON.stringify({ inputs: [input], outputs }));
  const headers = { "content-type": "application/octet-stream", "inference-header-content-length": String(header.length) };
  return post(model, new Blob([header, tensor.bytes]), headers);
}

/** Run a request whose whole body is an image file: the data of the model's only input. */
export async function inferFile(model, file, type) {
  return post(model, file, { "content-type": type });
}

/** Run a request that is JSON as it is. */
export async function inferJson(model, text) {
  return post(model, text, { "content-type": "application/json" });
}

/** Run a request of a decoupled model; `onEvent` receives each response as it comes. */
export async function generate(model, text, onEvent) {
  const headers = { "content-type": "application/json", ...credentials() };
  const response = await fetch(`${versionPath(model)}/generate_stream`, { method: "POST", body: text, headers });
  if (!response.ok) return parsed(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "", isOpen = true; isOpen;) {
    const { done, value = "" } = await reader.read();
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    isOpen = !done;
    for (const line of lines.filter((each) => each.startsWith("data: "))) {
      const event = parseJson(line.slice(6));
      if (event.error) throw new Error(event.error);
      onEvent(event);
    }
  }
}

async function post(model, body, headers) {
  return parsed(await fetch(`${versionPath(model)}/infer`, { method: "POST", body, headers: { ...headers, ...credentials() } }));
}

/** JSON to be read: an array of numbers stands in one line. */
export function written(value) {
  return JSON.stringify(value, null, 1).replace(/\[\n\s*([^[\]{}"]*?)\s*\n\s*\]/g, (_, numbers) => `[${numbers.replace(/\s+/g, " ")}]`);
}

/** Parse JSON that may have NaN, Infinity and -Infinity among its numbers: they become strings. */
export function parseJson(text) {
  try {
    return JSON.parse(text);
  } catch {
    return JSON.parse(text.replace(/"(?:[^"\\]|\\.)*"|-?(?:NaN|Infinity)/g, (part) => (part[0] === '"' ? part : `"${part}"`)));
  }
}

async function parsed(response) {
  const text = await response.text();
  let answer;
  try {
    answer = parseJson(text);
  } catch {
    throw new Error(`The server answered ${response.status} with something that is no JSON.`);
  }
  if (!response.ok) throw Object.assign(new Error(answer.error ?? `The server answered ${response.status}.`), { status: response.status });
  return answer;
}
