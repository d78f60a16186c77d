// Calls of an inference client with @grpc/grpc-js; prints "ok NAME" for each group of calls, or the fault.
//
// Usage: node client.js PROTOCOL_FOLDER HOST:PORT [CA.pem]
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const CONCURRENT_CALLS = 1000;
const STREAM_MESSAGES = 100;
const LARGE_ELEMENTS = 2 << 20;

const [folder, address, authority] = process.argv.slice(2);
const definition = loader.loadSync("grpc_service.proto", {
  includeDirs: [folder],
  keepCase: true,
  longs: Number,
  defaults: true,
});
const { GRPCInferenceService } = grpc.loadPackageDefinition(definition).inference;
const security = authority
  ? grpc.credentials.createSsl(readFileSync(authority))
  : grpc.credentials.createInsecure();

function connect(options = {}) {
  return new GRPCInferenceService(address, security, {
    "grpc.max_receive_message_length": 16 << 20,
    ...options,
  });
}

// A unary call as a promise; `start` gets the call, to cancel it.
function invoke(client, method, request, options = {}, start = () => {}) {
  return new Promise((resolve, reject) => {
    const deadline = Date.now() + 60_000;
    const done = (error, response) => (error ? reject(error) : resolve(response));
    start(client[method](request, options.metadata ?? new grpc.Metadata(), { deadline, ...options }, done));
  });
}

const bytes = (array) => Buffer.from(array.buffer, array.byteOffset, array.byteLength);
const floats = (content) => new Float32Array(new Uint8Array(content).buffer);

// A request of sum_difference: SUM = A + B, DIFFERENCE = A - B.
function request(id, a, b, typed) {
  const [as, bs] = [[a, 1, 2, 3], [b, 0.5, -2, 1e6]];
  const inputs = [
    { name: "A", datatype: "INT32", shape: [1, 4] },
    { name: "B", datatype: "FP32", shape: [1, 4] },
  ];
  if (!typed) {
    const raw_input_contents = [bytes(Int32Array.from(as)), bytes(Float32Array.from(bs))];
    return { model_name: "sum_difference", id, inputs, raw_input_contents };
  }
  inputs[0].contents = { int_contents: as };
  inputs[1].contents = { fp32_contents: bs };
  return { model_name: "sum_difference", id, inputs };
}

function verify(response, id, a, b) {
  assert.equal(response.id, id);
  const expected = { SUM: [a + b, 1.5, 0, 1000003], DIFFERENCE: [a - b, 0.5, 4, -999997] };
  assert.deepEqual(response.outputs.map((output) => output.name).sort(), ["DIFFERENCE", "SUM"]);
  response.outputs.forEach((output, index) => {
    assert.equal(output.datatype, "FP32");
    assert.deepEqual([...floats(response.raw_output_contents[index])], expected[output.name]);
  });
}

const PATIENT = {
  model_name: "patient",
  inputs: [{ name: "X", datatype: "FP32", shape: [1, 16] }],
  raw_input_contents: [Buffer.alloc(64)],
};

async function unary(client) {
  assert.equal((await invoke(client, "ServerLive", {})).live, true);
  console.log("ok live");
  const metadata = await invoke(client, "ModelMetadata", { name: "sum_difference" });
  assert.equal(metadata.name, "sum_difference");
  assert.deepEqual(metadata.inputs[0], { name: "A", datatype: "INT32", shape: [-1, 4] });
  console.log("ok metadata");
  for (const name of ["raw", "typed"]) {
    verify(await invoke(client, "ModelInfer", request(name, 7, 2.25, name === "typed")), name, 7, 2.25);
    console.log("ok", name);
  }
}

async function compressed() {
  const client = connect({ "grpc.default_compression_algorithm": grpc.compressionAlgorithms.gzip });
  verify(await invoke(client, "ModelInfer", request("gzip", 8, 4, false)), "gzip", 8, 4);
  client.close();
  console.log("ok gzip");
}

async function concurrent(client) {
  const numbers = Array.from({ length: CONCURRENT_CALLS }, (_, number) => number);
  const calls = numbers.map((number) =>
    invoke(client, "ModelInfer", request(`${number}`, number, 0.5, number % 2 === 0)),
  );
  (await Promise.all(calls)).forEach((response, number) => verify(response, `${number}`, number, 0.5));
  console.log("ok concurrent");
}

async function stream(client) {
  const call = client.ModelStreamInfer(new grpc.Metadata(), { deadline: Date.now() + 60_000 });
  for (let number = 0; number < STREAM_MESSAGES; number++) call.write(request(`${number}`, number, 0.25, false));
  call.end();
  let number = 0;
  for await (const message of call) {
    assert.equal(message.error_message, "");
    verify(message.infer_response, `${number}`, number, 0.25);
    number++;
  }
  assert.equal(number, STREAM_MESSAGES);
  console.log("ok stream");
}

async function failures(client) {
  const deadline = Date.now() + 200;
  await assert.rejects(invoke(client, "ModelInfer", PATIENT, { deadline }), { code: grpc.status.DEADLINE_EXCEEDED });
  console.log("ok deadline");

  const cancelled = invoke(client, "ModelInfer", PATIENT, {}, (call) => setTimeout(() => call.cancel(), 100));
  await assert.rejects(cancelled, { code: grpc.status.CANCELLED });
  verify(await invoke(client, "ModelInfer", request("after", 1, 1, false)), "after", 1, 1);
  console.log("ok cancel");

  const missing = await invoke(client, "ModelInfer", { model_name: "absent" }).catch((error) => error);
  assert.equal(missing.code, grpc.status.NOT_FOUND);
  assert.match(missing.details, /absent/);
  console.log("ok not_found");

  // The quota is one request in an hour.
  const excess = { ...PATIENT, model_name: "limited" };
  await invoke(client, "ModelInfer", excess).catch(() => {});
  const refused = await invoke(client, "ModelInfer", excess).catch((error) => error);
  assert.equal(refused.code, grpc.status.RESOURCE_EXHAUSTED);
  const details = refused.metadata.get("grpc-status-details-bin")[0];
  assert.equal(details[1], grpc.status.RESOURCE_EXHAUSTED); // field 1 of google.rpc.Status
  assert.ok(details.includes("type.googleapis.com/google.rpc.RetryInfo"));
  console.log("ok details");
}

async function large(client) {
  const content = bytes(Float32Array.from({ length: LARGE_ELEMENTS }, (_, index) => index));
  const inputs = [{ name: "X", datatype: "FP32", shape: [1, LARGE_ELEMENTS] }];
  const response = await invoke(client, "ModelInfer", { model_name: "identity", inputs, raw_input_contents: [content] });
  assert.ok(response.raw_output_contents[0].equals(content));
  console.log("ok large");
}

// Calls on a connection that is silent, but for pings, for several times their interval and timeout.
async function pings() {
  const client = connect({
    "grpc.keepalive_time_ms": 1000,
    "grpc.keepalive_timeout_ms": 4000,
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.use_local_subchannel_pool": 1,
  });
  await invoke(client, "ServerLive", {});
  await sleep(9000);
  assert.equal(client.getChannel().getConnectivityState(false), grpc.connectivityState.READY);
  await invoke(client, "ServerLive", {});
  client.close();
}

const pinging = pings();
const client = connect();
await unary(client);
await compressed();
await concurrent(client);
await stream(client);
await failures(client);
await large(client);
client.close();
await pinging;
console.log("ok keepalive");
