// The form of a model's view: drop a picture and see labels, send a file as it is, or send a request that is JSON.

import { generate, get, infer, inferFile, inferJson, versionPath, written } from "./client.js";
import { ranking } from "./charts.js";
import { element } from "./dom.js";
import { fileTask, fileTensor, pictureType, samplePicture } from "./files.js";
import { milliseconds, several, share } from "./format.js";
import { credentials } from "./key.js";
import { decode, pictureTask, tensorOf } from "./pictures.js";
import { asCurl, asPython, filledIn, generateAsPython, pictureAsCurl, pictureAsPython, sampleGenerate, sampleRequest } from "./samples.js";

const TOP = 5;
const PLACES = Object.fromEntries(
  ["try", "try-drop", "try-file", "try-what", "try-preview", "try-hint", "try-picture", "try-sample", "try-request", "try-text", "try-send", "try-curl", "try-python", "try-code", "try-result"]
    .map((id) => [id, document.getElementById(id)]),
);

let chosen = null;
let preview = "";

/** Show the form for a version that serves; null hides it. The form of the same version stays as it is. */
export function choose(model) {
  PLACES.try.hidden = !model;
  if (!model) {
    chosen = null;
  } else if (chosen?.model.name !== model.name || chosen.model.version !== model.version) {
    void prepare({ model, task: null, file: null, sent: null, decoupled: false });
  }
}

async function prepare(mine) {
  chosen = mine;
  for (const name of ["try-result", "try-code"]) PLACES[name].replaceChildren();
  for (const name of ["try-drop", "try-picture", "try-preview", "try-code"]) PLACES[name].hidden = true;
  PLACES["try-text"].value = PLACES["try-file"].value = "";
  try {
    const path = versionPath(mine.model);
    const [config, metadata] = await Promise.all([get(`${path}/config`), get(path)]);
    // Another one may have been chosen meanwhile.
    if (chosen !== mine) return;
    const task = pictureTask(config, metadata);
    const file = task ? null : await fileTask(config, metadata);
    if (chosen !== mine) return;
    const decoupled = Boolean(config.model_transaction_policy?.decoupled);
    Object.assign(mine, { task, file, decoupled });
    const picture = Boolean(task || file?.picture);
    PLACES["try-drop"].hidden = !task && !file;
    PLACES["try-picture"].hidden = !picture;
    PLACES["try-what"].textContent = picture ? "Drop a picture" : "Drop a file";
    PLACES["try-file"].accept = picture ? "image/*" : "";
    PLACES["try-hint"].textContent = hint(task, file);
    // No JSON can hold the bytes of a picture.
    PLACES["try-request"].hidden = PLACES["try-send"].hidden = Boolean(file?.picture);
    if (!file?.picture) PLACES["try-text"].value = decoupled ? sampleGenerate(config) : sampleRequest(metadata);
  } catch (error) {
    if (chosen === mine) complain(error);
  }
}

/** What is sent of a file. */
function hint(task, file) {
  if (task) {
    const [height, width] = task.recipe.crop;
    return `It is resized to ${width} × ${height} pixels ${task.recipe.by === "server" ? "and sent; the server does the rest" : "as the model's configuration says, and sent"}.`;
  }
  if (!file) return "";
  return file.picture ? "The file is sent as it is; the server decodes it." : `The file is sent as it is, as the input "${file.input}".`;
}

/** Show a command or program, and copy it where the browser allows that. */
async function copy(text) {
  PLACES["try-code"].textContent = text;
  PLACES["try-code"].hidden = false;
  // Without TLS browsers have no clipboard for other hosts: the text stands there to be selected.
  await navigator.clipboard?.writeText(text).catch(() => {});
}

function keyed() {
  return Object.keys(credentials()).length > 0;
}

/** The task of a command that sends a file as it is; null if the command sends the JSON. */
function commandTask(type) {
  const { file: task, sent } = chosen;
  return task?.picture || (task?.datatype === "BYTES" && sent?.type.startsWith(type)) ? task : null;
}

/** The next command sends the JSON again, not the file that was sent before. */
function forgetFile() {
  chosen.sent = null;
}

function routeOf(operation) {
  return new URL(`${versionPath(chosen.model)}/${operation}`, location.href.split("#")[0]).href;
}

function copyCurl() {
  if (chosen.decoupled) {
    void copy(asCurl(routeOf("generate_stream"), PLACES["try-text"].value, keyed()).replace("curl ", "curl -N "));
    return;
  }
  const url = routeOf("infer");
  // An image is the only file that can be a whole body.
  void copy(commandTask("image/") ? pictureAsCurl(url, chosen.sent, keyed()) : asCurl(url, PLACES["try-text"].value, keyed()));
}

function copyPython() {
  const address = `${location.host}${location.pathname.replace(/\/[^/]*$/, "")}`;
  const secure = location.protocol === "https:";
  const task = commandTask("");
  void copy(chosen.decoupled ? generateAsPython(routeOf("generate_stream"), PLACES["try-text"].value, keyed())
    : task ? pictureAsPython(address, secure, chosen.model, task, chosen.sent, keyed())
    : asPython(address, secure, chosen.model, PLACES["try-text"].value, keyed()));
}

/** Send a file that was dropped, pasted or chosen. */
async function sendFile(file) {
  const mine = chosen;
  if (!file || (!mine?.task && !mine?.file)) return;
  if (mine.task || mine.file.picture) showPreview(file);
  if (mine.task) await classify(file, mine);
  else await sendWhole(file, mine);
}

function showPreview(file) {
  URL.revokeObjectURL(preview);
  preview = URL.createObjectURL(file);
  PLACES["try-preview"].src = preview;
  PLACES["try-preview"].hidden = false;
}

async function classify(file, { model, task }) {
  await show(async () => {
    const tensor = tensorOf(await decode(file), task);
    const outputs = task.ranked.length ? task.ranked.map((name) => ({ name })) : [{ name: task.output, parameters: { classification: TOP } }];
    const begun = performance.now();
    const answer = await infer(model, task.input, tensor, outputs);
    return [ranking(bars(classesOf(answer, task))), element("p", { className: "soft" }, `answered in ${milliseconds(performance.now() - begun)}`)];
  });
}

async function sendWhole(file, mine) {
  const { model, file: task } = mine;
  mine.sent = file;
  await show(async () => {
    const tensor = task.picture ? null : await fileTensor(file, task);
    const begun = performance.now();
    return responseOf(await (task.picture ? inferFile(model, file, pictureType(file)) : infer(model, task.input, tensor)), begun);
  });
}

/** A response as JSON, and its time. */
function responseOf(answer, begun) {
  return [element("pre", {}, written(answer)), element("p", { className: "soft" }, `answered in ${milliseconds(performance.now() - begun)}`)];
}

/** Send a request to a decoupled model: its text, or its responses one a line, stand there as they come. */
async function stream() {
  const mine = chosen;
  await show(async () => {
    const [begun, shown] = [performance.now(), element("pre")];
    let responses = 0;
    await generate(mine.model, PLACES["try-text"].value, (response) => {
      const { text_output: text } = response;
      if (!responses++ && chosen === mine) PLACES["try-result"].replaceChildren(shown);
      shown.append(typeof text === "string" ? text : `${JSON.stringify(response)}\n`);
    });
    return [shown, element("p", { className: "soft" }, `${several(responses, "response")} in ${milliseconds(performance.now() - begun)}`)];
  });
}

async function send() {
  forgetFile();
  if (chosen.decoupled) {
    await stream();
    return;
  }
  await show(async () => {
    const begun = performance.now();
    return responseOf(await inferJson(chosen.model, filledIn(PLACES["try-text"].value)), begun);
  });
}

/** Show what `work` gives, or why it failed; nothing if another model was chosen meanwhile. */
async function show(work) {
  const mine = chosen;
  PLACES["try-result"].replaceChildren(element("p", { className: "soft" }, "asking …"));
  try {
    const shown = await work();
    if (chosen === mine) PLACES["try-result"].replaceChildren(...shown);
  } catch (error) {
    if (chosen === mine) complain(error);
  }
}

function complain(error) {
  PLACES["try-result"].replaceChildren(element("p", { className: "error" }, error.message));
}

/** [{score, label}] of the answer, best first. */
function classesOf(answer, task) {
  const outputs = Object.fromEntries(answer.outputs.map((output) => [output.name, output.data.flat()]));
  if (task.ranked.length) {
    const [scores, classes, labels] = task.ranked.map((name) => outputs[name]);
    return scores.slice(0, TOP).map((score, place) => ({ score, label: labels?.[place] || `class ${classes[place]}` }));
  }
  return outputs[task.output].slice(0, TOP).map((line) => {
    const [score, index, ...label] = line.split(":");
    return { score: Number(score), label: label.join(":") || `class ${index}` };
  });
}

/** Probabilities as shares; scores that are none as numbers, their bars from the lowest that is shown. */
function bars(classes) {
  const scores = classes.map(({ score }) => score);
  const probable = scores.every((score) => score >= 0 && score <= 1.0001);
  const [high, low] = [Math.max(...scores), Math.min(...scores)];
  return classes.map(({ score, label }) =>
    probable ? [label, score, share(score)] : [label, high > low ? 0.1 + (0.9 * (score - low)) / (high - low) : 1, score.toPrecision(4)]);
}

/** Wire the form. */
export function start() {
  const drop = PLACES["try-drop"];
  PLACES["try-sample"].addEventListener("click", async () => void sendFile(await samplePicture()));
  PLACES["try-curl"].addEventListener("click", copyCurl);
  PLACES["try-python"].addEventListener("click", copyPython);
  PLACES["try-file"].addEventListener("change", (event) => void sendFile(event.target.files[0]));
  PLACES["try-send"].addEventListener("click", () => void send());
  PLACES["try-text"].addEventListener("input", forgetFile);
  for (const name of ["dragenter", "dragover"]) {
    drop.addEventListener(name, (event) => {
      event.preventDefault();
      drop.classList.add("over");
    });
  }
  drop.addEventListener("dragleave", () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    void sendFile(event.dataTransfer.files[0]);
  });
  document.addEventListener("paste", (event) => void sendFile([...event.clipboardData.files][0]));
}
