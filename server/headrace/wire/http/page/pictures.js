// From a picture to the tensor that a model takes, as its configuration describes it: what `headrace infer` does, in a browser.
// The arithmetic of resizing is that of server/headrace/inference/pipelines/recipe.py, where it is explained; so the answers are the same.

// What a server takes of `headrace infer`, too (server/headrace/inference/pipelines/image.py).
const MAX_PIXELS = 50e6;
const PRECISION_BITS = 22;
const PREFIX = "headrace.";

const RECIPE = {
  input: "", color: "rgb", resize_short_side: 256, crop: [224, 224], interpolation: "bilinear", mean: [0], std: [1],
  layout: "nchw", by: "client", source: null,
};

/** How a model takes pictures and gives classes, by its configuration and metadata; null if it takes none. */
export function pictureTask(config, metadata) {
  const settings = section(config, "preprocess");
  if (Object.keys(settings).length === 0) return null;
  const recipe = { ...RECIPE, ...settings };
  for (const name of ["mean", "std"]) recipe[name] = [recipe[name]].flat();
  recipe.channels = recipe.color === "gray" ? 1 : 3;
  const input = metadata.inputs.find((tensor) => tensor.name === String(recipe.input)) ?? metadata.inputs[0];
  const ranks = { top_k: 0, scores: "scores", classes: "classes", labels: "labels", ...section(config, "postprocess") };
  const offered = metadata.outputs.map((tensor) => tensor.name);
  const labelled = config.output.find((output) => output.label_filename);
  return {
    recipe,
    input: input.name,
    datatype: input.datatype,
    dimensions: config.max_batch_size > 0 || input.shape.length !== 3 ? 4 : 3,
    output: labelled && offered.includes(labelled.name) ? labelled.name : offered[0],
    ranked: ranks.top_k > 0 ? [ranks.scores, ranks.classes, ranks.labels].map(String).filter((name) => offered.includes(name)) : [],
  };
}

/** Fields of Headrace's own in a configuration: parameters whose values are JSON or bare words. */
function section(config, name) {
  const prefix = `${PREFIX}${name}.`;
  const found = {};
  for (const [key, parameter] of Object.entries(config.parameters ?? {})) {
    if (!key.startsWith(prefix)) continue;
    try {
      found[key.slice(prefix.length)] = JSON.parse(parameter.string_value);
    } catch {
      found[key.slice(prefix.length)] = parameter.string_value;
    }
  }
  return found;
}

/** The pixels of a picture's file, upright, transparency over white: {width, height, data: RGBA}. */
export async function decode(file) {
  // Colour profiles are not applied: models are trained on pixels as they are stored.
  const bitmap = await createImageBitmap(file, { imageOrientation: "from-image", colorSpaceConversion: "none" }).catch(() => {
    throw new Error(`${file.name || "This"} is no picture that this browser can read: save it as JPEG or PNG.`);
  });
  const { width, height } = bitmap;
  if (width * height > MAX_PIXELS) throw new Error(`The picture has ${width} x ${height} pixels, at most ${MAX_PIXELS / 1e6} million are taken.`);
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [width, height];
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = "#fff";
  context.fillRect(0, 0, width, height);
  context.drawImage(bitmap, 0, 0);
  bitmap.close();
  return { width, height, data: context.getImageData(0, 0, width, height).data };
}

/** The tensor of one picture: {shape, datatype, bytes}. */
export function tensorOf(picture, task) {
  const { recipe } = task;
  const [height, width] = recipe.by === "server" ? (recipe.source ?? recipe.crop) : recipe.crop;
  const box = recipe.by === "server" && recipe.source ? centre(picture, height, width) : cropWindow(picture, recipe);
  const pixels = resize(channelsOf(picture, recipe.channels), picture, recipe.channels, box, height, width, recipe.interpolation);
  if (recipe.by === "server") return { shape: [1, height, width, recipe.channels].slice(4 - task.dimensions), datatype: "UINT8", bytes: pixels };
  const planes = recipe.layout === "nchw";
  const shape = planes ? [1, recipe.channels, height, width] : [1, height, width, recipe.channels];
  const values = new Float32Array(pixels.length);
  const count = width * height;
  for (let channel = 0; channel < recipe.channels; channel++) {
    const mean = recipe.mean[channel % recipe.mean.length];
    const std = recipe.std[channel % recipe.std.length];
    for (let place = 0; place < count; place++) {
      const from = place * recipe.channels + channel;
      values[planes ? channel * count + place : from] = Math.fround(Math.fround(pixels[from] - mean) / std);
    }
  }
  return { shape: shape.slice(4 - task.dimensions), datatype: task.datatype, bytes: encoded(values, task.datatype) };
}

function encoded(values, datatype) {
  if (datatype === "FP32") return new Uint8Array(values.buffer);
  if (datatype === "UINT8") return Uint8Array.from(values, (value) => Math.max(0, Math.min(255, Math.round(value))));
  if (datatype === "FP16") return new Uint8Array(Uint16Array.from(values, half).buffer);
  throw new Error(`The model takes ${datatype}; pictures go to FP32, FP16 or UINT8.`);
}

/** The bits of a number as IEEE 754 binary16, rounded to even. */
export function half(value) {
  const sign = value < 0 || Object.is(value, -0) ? 0x8000 : 0;
  const size = Math.abs(value);
  if (Number.isNaN(size)) return 0x7e00;
  if (size >= 65520) return sign | 0x7c00;
  // The exponent of the last digit; all subnormal numbers have the same.
  const last = Math.max(Math.floor(Math.log2(size || 1e-9)), -14) - 10;
  const digits = size / 2 ** last;
  const whole = Math.floor(digits);
  const rest = digits - whole;
  const rounded = whole + (rest > 0.5 || (rest === 0.5 && whole % 2) ? 1 : 0);
  return sign | (((last + 24) << 10) + rounded);
}

/** What of a picture ends up in the crop: left, top, right, bottom in its own pixels. See ImageRecipe.window. */
function cropWindow({ width, height }, recipe) {
  const short = recipe.resize_short_side;
  const across = width <= height ? short : Math.floor((short * width) / height);
  const down = width <= height ? Math.floor((short * height) / width) : short;
  const [cropHeight, cropWidth] = recipe.crop;
  const left = Math.floor((across - cropWidth) / 2);
  const top = Math.floor((down - cropHeight) / 2);
  const [x, y] = [width / across, height / down];
  return [left * x, top * y, Math.min((left + cropWidth) * x, width), Math.min((top + cropHeight) * y, height)];
}

function centre(picture, height, width) {
  const scale = Math.min(picture.width / width, picture.height / height);
  const left = (picture.width - width * scale) / 2;
  const top = (picture.height - height * scale) / 2;
  return [left, top, Math.min(left + width * scale, picture.width), Math.min(top + height * scale, picture.height)];
}

function channelsOf({ data }, channels) {
  const found = new Uint8Array((data.length / 4) * channels);
  for (let from = 0, to = 0; from < data.length; from += 4) {
    if (channels === 1) found[to++] = (data[from] * 19595 + data[from + 1] * 38470 + data[from + 2] * 7471 + 0x8000) >> 16;
    else for (let channel = 0; channel < 3; channel++) found[to++] = data[from + channel];
  }
  return found;
}

function resize(pixels, { width, height }, channels, [left, top, right, bottom], newHeight, newWidth, interpolation) {
  const across = axis(width, left, right, newWidth, interpolation);
  const down = axis(height, top, bottom, newHeight, interpolation);
  // Only the rows that the second pass looks at.
  const first = Math.min(...down.first);
  const rows = Math.min(Math.max(...down.first) + down.taps, height) - first;
  const narrow = new Uint8Array(rows * newWidth * channels);
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < newWidth; column++) {
      for (let channel = 0; channel < channels; channel++) {
        let total = 1 << (PRECISION_BITS - 1);
        for (let tap = 0; tap < across.taps; tap++) {
          const place = Math.min(across.first[column] + tap, width - 1);
          total += pixels[((row + first) * width + place) * channels + channel] * across.weights[column * across.taps + tap];
        }
        narrow[(row * newWidth + column) * channels + channel] = byte(total);
      }
    }
  }
  const line = newWidth * channels;
  const result = new Uint8Array(newHeight * line);
  for (let row = 0; row < newHeight; row++) {
    for (let place = 0; place < line; place++) {
      let total = 1 << (PRECISION_BITS - 1);
      for (let tap = 0; tap < down.taps; tap++) {
        const from = Math.min(down.first[row] - first + tap, rows - 1);
        total += narrow[from * line + place] * down.weights[row * down.taps + tap];
      }
      result[row * line + place] = byte(total);
    }
  }
  return result;
}

function byte(total) {
  return Math.max(0, Math.min(255, total >> PRECISION_BITS));
}

/** The weights that make `size` pixels of those between two places, in 1 / 2 ** PRECISION_BITS. */
function axis(source, low, high, size, interpolation) {
  [low, high] = [Math.fround(low), Math.fround(high)];
  const scale = Math.fround(high - low) / size;
  const stretch = Math.max(scale, 1);
  const support = (interpolation === "bicubic" ? 2 : 1) * stretch;
  const kernel = interpolation === "bicubic" ? bicubic : bilinear;
  const first = new Int32Array(size);
  const rows = [];
  for (let index = 0; index < size; index++) {
    const middle = low + (index + 0.5) * scale;
    const start = Math.max(Math.trunc(middle - support + 0.5), 0);
    const stop = Math.min(Math.trunc(middle + support + 0.5), source);
    const shares = [];
    for (let place = start; place < stop; place++) shares.push(kernel((place - middle + 0.5) / stretch));
    const total = shares.reduce((sum, value) => sum + value, 0) || 1;
    first[index] = start;
    rows.push(shares.map((value) => fixed(value / total)));
  }
  const taps = Math.max(...rows.map((row) => row.length));
  const weights = new Int32Array(size * taps);
  rows.forEach((row, index) => weights.set(row, index * taps));
  return { first, taps, weights };
}

function fixed(value) {
  return Math.trunc(value * 2 ** PRECISION_BITS + (value >= 0 ? 0.5 : -0.5));
}

function bilinear(x) {
  return Math.max(1 - Math.abs(x), 0);
}

function bicubic(x) {
  x = Math.abs(x);
  if (x < 1) return (1.5 * x - 2.5) * x * x + 1;
  return x < 2 ? (((x - 5) * x + 8) * x - 4) * -0.5 : 0;
}
