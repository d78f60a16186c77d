// Models with an input that is a whole file, such as a JPEG, and the requests that send one.

import { get, versionPath } from "./client.js";

// Pipelines may call pipelines; deeper ones than this are treated like any model.
const MAX_DEPTH = 4;
const STEPS = "headrace.pipeline.steps.";
const NONE = '""';

/** The input of a version that takes a file: {input, datatype, shape, picture}; null if a file does not fit. `picture` is true if a
 * pipeline decodes the file as an image; otherwise the model reads the bytes. `shape` has -1 for the number of bytes of UINT8. */
export async function fileTask(config, metadata) {
  const optional = new Set(config.input.filter((input) => input.optional).map((input) => input.name));
  const required = metadata.inputs.filter((input) => !optional.has(input.name));
  if (required.length !== 1) return null;
  const [{ name, datatype, shape }] = required;
  if (datatype === "BYTES") {
    const sizes = shape.map((size) => (size === -1 ? 1 : size));
    return sizes.every((size) => size === 1) ? { input: name, datatype, shape: sizes, picture: await decodes(config, name) } : null;
  }
  const rows = config.max_batch_size > 0 && shape.length > 1 ? 1 : 0;
  const takesBytes = datatype === "UINT8" && shape.length === rows + 1 && shape[rows] === -1;
  return takesBytes ? { input: name, datatype, shape: [...Array(rows).fill(1), -1], picture: false } : null;
}

/** Whether a pipeline, or one that it calls, decodes the input as an image. */
async function decodes(config, input, depth = 0) {
  const steps = stepsOf(config).filter((step) => Object.values(step.inputs).includes(input));
  if (steps.some((step) => step.builtin === "decode_image" && step.inputs.image === input)) return true;
  if (depth >= MAX_DEPTH) return false;
  for (const { model, inputs } of steps.filter((step) => step.model)) {
    const [name, version = ""] = model.split("/");
    // A model that does not serve says nothing of its inputs.
    const called = await get(`${versionPath({ name, version })}/config`).catch(() => null);
    for (const [inner, tensor] of Object.entries(inputs)) {
      if (called && tensor === input && (await decodes(called, inner, depth + 1))) return true;
    }
  }
  return false;
}

/** Steps of a pipeline by its configuration: [{builtin, model, inputs: {input of the step: tensor}}]. */
function stepsOf(config) {
  const ensemble = (config.ensemble_scheduling?.step ?? []).map((step) => ({
    builtin: "", model: Number(step.model_version) > 0 ? `${step.model_name}/${step.model_version}` : step.model_name, inputs: step.input_map,
  }));
  const parameters = Object.entries(config.parameters ?? {}).filter(([key]) => key.startsWith(STEPS)).map(([key, { string_value: value }]) => [key, value === NONE ? "" : value]);
  const values = Object.fromEntries(parameters);
  return [...ensemble, ...parameters.filter(([key]) => key.endsWith(".builtin")).map(([key, builtin]) => {
    const step = key.slice(0, -"builtin".length);
    const inputs = parameters.filter(([name]) => name.startsWith(`${step}inputs.`)).map(([name, tensor]) => [name.slice(`${step}inputs.`.length), tensor]);
    return { builtin, model: values[`${step}model`], inputs: Object.fromEntries(inputs) };
  })];
}

/** The tensor of a file for a model that reads its bytes: {shape, datatype, bytes}. */
export async function fileTensor(file, task) {
  const content = new Uint8Array(await file.arrayBuffer());
  if (task.datatype !== "BYTES") return { shape: task.shape.map((size) => (size < 0 ? content.length : size)), datatype: task.datatype, bytes: content };
  // An element of BYTES begins with its length, 4 bytes in little-endian order.
  const bytes = new Uint8Array(4 + content.length);
  new DataView(bytes.buffer).setUint32(0, content.length, true);
  bytes.set(content, 4);
  return { shape: task.shape, datatype: task.datatype, bytes };
}

/** The content type of a picture; the server reads the format from the file. */
export function pictureType(file) {
  return file.type.startsWith("image/") ? file.type : "image/unknown";
}

/** A picture with edges and colours, drawn here. */
export function samplePicture() {
  const canvas = Object.assign(document.createElement("canvas"), { width: 320, height: 240 });
  const context = canvas.getContext("2d");
  const sky = context.createLinearGradient(0, 0, 0, 240);
  sky.addColorStop(0, "#4a90d9");
  sky.addColorStop(1, "#f4e1c1");
  context.fillStyle = sky;
  context.fillRect(0, 0, 320, 240);
  for (const [colour, x, y, radius] of [["#f5a623", 240, 60, 30], ["#417505", 90, 210, 80], ["#2d5016", 220, 230, 90]]) {
    context.fillStyle = colour;
    context.beginPath();
    context.arc(x, y, radius, 0, 2 * Math.PI);
    context.fill();
  }
  return new Promise((resolve) => canvas.toBlob((blob) => resolve(new File([blob], "sample.png", { type: "image/png" })), "image/png"));
}
