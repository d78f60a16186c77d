// The form: choose a model, drop a picture, see labels. A model that takes no pictures gets JSON.

import { get, infer, inferJson, versionPath } from "./client.js";
import { ranking } from "./charts.js";
import { element } from "./dom.js";
import { milliseconds, share } from "./format.js";
import { decode, pictureTask, tensorOf } from "./pictures.js";

const TOP = 5;
const SHOWN_ELEMENTS = 4096;
const PLACES = Object.fromEntries(
  ["try-model", "try-drop", "try-file", "try-preview", "try-hint", "try-json", "try-text", "try-send", "try-result"].map((id) => [id, document.getElementById(id)]),
);

let known = "";
let chosen = null;
let preview = "";

/** Bring the list of models up to date. */
export function offer(models) {
  const names = models.map((model) => `${model.name} · version ${model.version}`);
  if (names.join("\n") === known) return;
  known = names.join("\n");
  const select = PLACES["try-model"];
  const before = select.value;
  select.replaceChildren(...models.map((model, place) => Object.assign(element("option", { value: names[place] }, names[place]), { model })));
  const kept = [...select.options].find((option) => option.value === before);
  if (kept) {
    select.value = before;
  } else {
    void choose();
  }
}

/** Select the model of a card. */
export function select(model) {
  PLACES["try-model"].value = `${model.name} · version ${model.version}`;
  void choose();
}

async function choose() {
  const model = PLACES["try-model"].selectedOptions[0]?.model;
  const mine = (chosen = { model, task: null });
  PLACES["try-result"].replaceChildren();
  if (!model) return;
  try {
    const path = versionPath(model);
    const [config, metadata] = await Promise.all([get(`${path}/config`), get(path)]);
    // Another one may have been chosen meanwhile.
    if (chosen !== mine) return;
    mine.task = pictureTask(config, metadata);
    PLACES["try-drop"].hidden = !mine.task;
    PLACES["try-json"].hidden = Boolean(mine.task);
    if (mine.task) {
      const [height, width] = mine.task.recipe.crop;
      PLACES["try-hint"].textContent = `It is resized to ${width} × ${height} pixels ${mine.task.recipe.by === "server" ? "and sent; the server does the rest" : "as the model's configuration says, and sent"}.`;
    } else {
      PLACES["try-text"].value = request(metadata);
    }
  } catch (error) {
    if (chosen === mine) complain(error);
  }
}

/** A request to be changed by hand: an input a line. */
function request(metadata) {
  const inputs = metadata.inputs.map((input) => ` ${JSON.stringify(zeros(input))}`);
  return `{"inputs": [\n${inputs.join(",\n")}\n]}`;
}

function zeros({ name, datatype, shape }) {
  const sizes = shape.map((size) => (size < 0 ? 1 : size));
  const count = sizes.reduce((product, size) => product * size, 1);
  const zero = datatype === "BYTES" ? "" : datatype === "BOOL" ? false : 0;
  return { name, datatype, shape: sizes, data: count > SHOWN_ELEMENTS ? [] : Array(count).fill(zero) };
}

async function classify(file) {
  const { model, task } = chosen ?? {};
  if (!task || !file) return;
  URL.revokeObjectURL(preview);
  preview = URL.createObjectURL(file);
  PLACES["try-preview"].src = preview;
  PLACES["try-preview"].hidden = false;
  await show(async () => {
    const tensor = tensorOf(await decode(file), task);
    const outputs = task.ranked.length ? task.ranked.map((name) => ({ name })) : [{ name: task.output, parameters: { classification: TOP } }];
    const begun = performance.now();
    const answer = await infer(model, task.input, tensor, outputs);
    return [ranking(bars(classesOf(answer, task))), element("p", { className: "soft" }, `answered in ${milliseconds(performance.now() - begun)}`)];
  });
}

async function send() {
  await show(async () => {
    const begun = performance.now();
    const answer = await inferJson(chosen.model, PLACES["try-text"].value);
    return [element("pre", {}, JSON.stringify(answer, null, 1)), element("p", { className: "soft" }, `answered in ${milliseconds(performance.now() - begun)}`)];
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
  PLACES["try-model"].addEventListener("change", () => void choose());
  PLACES["try-file"].addEventListener("change", (event) => void classify(event.target.files[0]));
  PLACES["try-send"].addEventListener("click", () => void send());
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
    void classify(event.dataTransfer.files[0]);
  });
  document.addEventListener("paste", (event) => void classify([...event.clipboardData.files][0]));
}
