// Sample requests, and the same requests as commands of curl and as Python.

import { pictureType } from "./files.js";

// Longer inputs are written as ZEROS, and filled in when the request is sent.
const MAX_ELEMENTS = 256;
const ZEROS = "zeros";
// Stands for the bytes of a file while its program is written.
const FILE = "the bytes of the file";
// The name of a file that has not been chosen.
const PICTURE = "picture.jpg";
const DTYPES = {
  BOOL: "bool_", FP16: "float16", FP32: "float32", FP64: "float64", INT8: "int8", INT16: "int16", INT32: "int32", INT64: "int64",
  UINT8: "uint8", UINT16: "uint16", UINT32: "uint32", UINT64: "uint64",
};

/** A request to be changed by hand, an input a line. */
export function sampleRequest(metadata) {
  const inputs = metadata.inputs.map((input) => ` ${JSON.stringify(sampleInput(input))}`);
  return `{"inputs": [\n${inputs.join(",\n")}\n]}`;
}

function sampleInput({ name, datatype, shape }) {
  const sizes = shape.map((size) => (size < 0 ? 1 : size));
  const count = elements(sizes);
  const value = datatype === "BYTES" ? "text" : datatype === "BOOL" ? false : 0;
  return { name, datatype, shape: sizes, data: count > MAX_ELEMENTS ? ZEROS : Array(count).fill(value) };
}

/** A request to `/generate_stream`: its required inputs by name, and a number of tokens that a reader can wait for. */
export function sampleGenerate(config) {
  const inputs = config.input.filter((input) => !input.optional || input.name === "max_tokens");
  return JSON.stringify(Object.fromEntries(inputs.map(({ name, data_type: type, dims }) => {
    const value = type === "TYPE_STRING" ? "The " : type === "TYPE_BOOL" ? false : name === "max_tokens" ? 40 : 0;
    const count = elements(dims.map((size) => Math.max(size, 1)));
    return [name, count === 1 ? value : Array(Math.min(count, MAX_ELEMENTS)).fill(value)];
  })), null, 1);
}

/** A program of Python's standard library that sends a request to `/generate_stream`, and prints each response as it comes. */
export function generateAsPython(url, text, keyed) {
  const key = keyed ? `, "Authorization": f"Bearer {os.environ['HEADRACE_KEY']}"` : "";
  return `import json${keyed ? ", os" : ""}, urllib.request

request = urllib.request.Request(${python(url)}, ${python(oneLine(text))}.encode(), {"Content-Type": "application/json"${key}})
for line in urllib.request.urlopen(request):
    if line.startswith(b"data: "):
        print(json.loads(line[6:]), flush=True)
`;
}

/** The request with ZEROS written out; a text that is no JSON stays as it is, for the server to refuse. */
export function filledIn(text) {
  try {
    const request = JSON.parse(text);
    for (const input of request.inputs ?? []) if (input.data === ZEROS) input.data = Array(elements(input.shape)).fill(input.datatype === "BYTES" ? "" : 0);
    return JSON.stringify(request);
  } catch {
    return text;
  }
}

/** A command that sends the request; `keyed` if the server asks for a key. */
export function asCurl(url, text, keyed) {
  const key = keyed ? ` -H "Authorization: Bearer $HEADRACE_KEY"` : "";
  const target = `${quoted(url)} -H 'Content-Type: application/json'${key}`;
  const request = parsed(text);
  if (!request?.inputs?.some((input) => input.data === ZEROS)) return `curl ${target} -d ${quoted(oneLine(text))}`;
  const filled = request.inputs.map((input) => {
    const value = input.data === ZEROS ? `[${input.datatype === "BYTES" ? '""' : "0"}] * ${elements(input.shape)}` : python(input.data);
    return `{"name": ${python(input.name)}, "datatype": ${python(input.datatype)}, "shape": ${python(input.shape)}, "data": ${value}}`;
  });
  return `python3 -c ${quoted(`import json; print(json.dumps({"inputs": [${filled.join(", ")}]}))`)} |\n  curl ${target} --data-binary @-`;
}

/** A program with Triton's client that sends the request. */
export function asPython(address, secure, model, text, keyed) {
  const request = parsed(text);
  if (!request?.inputs) return "# The request is no JSON.";
  const lines = [...(keyed ? ["import os", ""] : []), "import numpy as np", "import tritonclient.http as triton", "",
    `client = triton.InferenceServerClient(${python(address)}${secure ? ", ssl=True" : ""})`, "inputs = []"];
  for (const input of request.inputs) {
    const shape = python(input.shape);
    const dtype = input.datatype === "BYTES" ? "np.object_" : `np.${DTYPES[input.datatype] ?? "float32"}`;
    const array = input.data === ZEROS && input.datatype !== "BYTES" ? `np.zeros(${shape}, ${dtype})`
      : `np.array(${input.data === ZEROS ? `[""] * ${elements(input.shape)}` : python([input.data].flat(Infinity))}, ${dtype}).reshape(${shape})`;
    lines.push(`inputs.append(triton.InferInput(${python(input.name)}, ${shape}, ${python(input.datatype)}))`, `inputs[-1].set_data_from_numpy(${array})`);
  }
  const headers = keyed ? `, headers={"authorization": f"Bearer {os.environ['HEADRACE_KEY']}"}` : "";
  lines.push(`result = client.infer(${python(model.name)}, inputs, model_version=${python(model.version)}${headers})`,
    'for output in result.get_response()["outputs"]:', '    print(output["name"], result.as_numpy(output["name"]))');
  return `${lines.join("\n")}\n`;
}

/** A command that sends a picture file as it is; `file` is null if none has been chosen. */
export function pictureAsCurl(url, file, keyed) {
  const key = keyed ? ` -H "Authorization: Bearer $HEADRACE_KEY"` : "";
  return `curl ${quoted(url)} -H ${quoted(`Content-Type: ${pictureType(file ?? { type: "image/jpeg" })}`)}${key} --data-binary ${quoted(`@${file?.name ?? PICTURE}`)}`;
}

/** A program with Triton's client that sends a picture file as it is; `task` as `fileTask` returns it. */
export function pictureAsPython(address, secure, model, task, file, keyed) {
  const request = JSON.stringify({ inputs: [{ name: task.input, datatype: task.datatype, shape: task.shape, data: FILE }] });
  return asPython(address, secure, model, request, keyed).replace(`np.array(["${FILE}"]`, () => `np.array([open(${python(file?.name ?? PICTURE)}, "rb").read()]`);
}

function elements(shape) {
  return shape.reduce((product, size) => product * size, 1);
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

function oneLine(text) {
  const request = parsed(text);
  return request ? JSON.stringify(request) : text;
}

/** JSON as Python writes it. */
function python(value) {
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  return value === true ? "True" : value === false ? "False" : value === null ? "None" : JSON.stringify(value);
}

/** A word of a POSIX shell. */
function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}
