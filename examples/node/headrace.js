// The parts of producer and consumer that are not specific to them: connections and calls, events in the columns of an
// EventBatch, and when to try again.
"use strict";

const fs = require("node:fs");
const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");

// The .proto files import each other as headrace/proto/v1/…, so they must be at this path below the folder. The Python
// package has them, too: then it is the folder that contains `headrace`.
const PROTOS = path.join(__dirname, "protos");
const FILES = ["publisher", "consumer"].map((name) => `headrace/proto/v1/${name}.proto`);

const definition = protoLoader.loadSync(FILES, {
  includeDirs: [PROTOS],
  keepCase: true, // names as the .proto files have them
  defaults: true, // a missing field has its default: 0, "", [], null for a message
  longs: String, // offsets have 64 bits, which a number of JavaScript cannot hold
  enums: String,
});

// A batch takes as many bytes of credit as it has in the response. So give each batch this number, as `wireBytes`.
const subscribe = definition["headrace.v1.ConsumerService"].Subscribe;
const decode = subscribe.responseDeserialize;
subscribe.responseDeserialize = (bytes) => {
  const response = decode(bytes);
  batchSizes(bytes).forEach((size, place) => (response.batches[place].wireBytes = size));
  return response;
};

// The size of each element of `batches`, which is field 1, with its tag and length. Every field of the response is a
// message: a tag of one byte, the length as a varint, and so many bytes.
function batchSizes(bytes) {
  const sizes = [];
  for (let start = 0, at = 0; at < bytes.length; start = at) {
    const tag = bytes[at++];
    let length = 0;
    for (let shift = 0, more = true; more; shift += 7) {
      more = bytes[at] > 127;
      length += (bytes[at++] & 127) * 2 ** shift;
    }
    at += length;
    if (tag === 10) sizes.push(at - start);
  }
  return sizes;
}

const services = grpc.loadPackageDefinition(definition).headrace.v1;

// A client of a service. HEADRACE_CA: file with the certificate of the authority that signed the silo's, for TLS.
function connect(service, address) {
  const ca = process.env.HEADRACE_CA;
  const credentials = ca ? grpc.credentials.createSsl(fs.readFileSync(ca)) : grpc.credentials.createInsecure();
  return new services[service](address, credentials, {
    "grpc.keepalive_time_ms": 10_000, // notice a silo that vanished silently
    "grpc.keepalive_timeout_ms": 5_000,
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1_000,
  });
}

// Sent with each call. HEADRACE_TOKEN: the token, if the silo requires one.
function metadata() {
  const sent = new grpc.Metadata();
  if (process.env.HEADRACE_TOKEN) sent.set("authorization", `Bearer ${process.env.HEADRACE_TOKEN}`);
  return sent;
}

// Resolves when a stream of responses has ended in order. Rejects with its error, or with that of `hear`.
function ended(call, hear) {
  return new Promise((resolve, reject) => {
    call.on("data", (response) => hear(response).catch(reject));
    call.on("end", resolve);
    call.on("error", reject);
  });
}

// An EventBatch is columns: the sizes of all payloads, and the payloads as one.
function batchOf(namespace, key, payloads) {
  return { namespace, key, sizes: payloads.map((one) => one.length), payload: Buffer.concat(payloads) };
}

// The events of a delivered batch, each with its index in the batch as it was published.
function* eventsOf(batch) {
  let start = 0;
  for (const [place, size] of batch.sizes.entries()) {
    yield {
      index: batch.indexes.length ? batch.indexes[place] : place, // only some may be delivered
      id: batch.ids[place] ?? "",
      headers: batch.headers[place]?.values ?? {},
      payload: batch.payload.subarray(start, (start += size)),
    };
  }
}

// The latest owner of each queue. Silos learn of changes at different times: the owner with the highest epoch is right.
function newest(before, now) {
  const latest = new Map();
  for (const owner of [...before, ...now]) {
    if (!(Number(owner.epoch) < Number(latest.get(owner.queue)?.epoch))) latest.set(owner.queue, owner);
  }
  return [...latest.values()];
}

// The report on a batch of which the first events are done: the others are released.
function reportOf({ queue, epoch, generation }, { offset }, events, done) {
  const index = events[0].index;
  const acknowledgement = { offset, index, count: done && events[done - 1].index + 1 - index };
  const acknowledgements = done ? [acknowledgement] : [];
  const released = done < events.length ? [{ offset, index: events[done].index }] : [];
  return { queue, epoch, generation, acknowledgements, released };
}

// How later sessions of a consumer open. They name the subscription only: if it was deleted, it is not created again.
// Throws if it was created anew with another selector.
function openAgain({ name, selector }, { consumer, definition }) {
  if (definition.selector !== selector) throw new Error(`${name} was created anew, and selects ${definition.selector}`);
  return { subscription: name, consumer, direct: true };
}

// Whether the same call may succeed later. The silo says so of its own errors; a broken connection may come back.
function retryable(error) {
  const { CANCELLED, DEADLINE_EXCEEDED, INTERNAL, UNAVAILABLE } = grpc.status;
  const has = (key) => (error.metadata?.get(key) ?? []).length > 0;
  if (has("headrace-code")) return has("headrace-retry-after-ms");
  return [CANCELLED, DEADLINE_EXCEEDED, INTERNAL, UNAVAILABLE].includes(error.code);
}

// Wait after so many failures in a row: longer and longer, and not in step with other clients.
function backoff(failures) {
  const limit_ms = Math.min(50 * 2 ** failures, 2_000);
  return new Promise((resume) => setTimeout(resume, (0.5 + Math.random() / 2) * limit_ms));
}

module.exports = { connect, metadata, ended, batchOf, eventsOf, reportOf, newest, openAgain, retryable, backoff };
