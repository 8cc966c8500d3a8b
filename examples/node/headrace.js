// What producer and consumer share: the connection, events in the columns of an EventBatch, and when to try again.
"use strict";

const fs = require("node:fs");
const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");

// The .proto files import each other as headrace/proto/v1/…, so that is where they have to lie. They come with the
// Python package, too: then this is the folder that holds `headrace`.
const PROTOS = path.join(__dirname, "protos");
const FILES = ["publisher", "consumer"].map((name) => `headrace/proto/v1/${name}.proto`);

const definition = protoLoader.loadSync(FILES, {
  includeDirs: [PROTOS],
  keepCase: true, // names as the .proto files have them
  defaults: true, // a field that is not there has its default: 0, "", [], null for a message
  longs: String, // offsets have 64 bits, which a number of JavaScript cannot hold
  enums: String,
});

// Credit is granted in bytes as well, as they are on the wire: so tell of each response how many it had.
const subscribe = definition["headrace.v1.ConsumerService"].Subscribe;
const decode = subscribe.responseDeserialize;
subscribe.responseDeserialize = (bytes) => Object.assign(decode(bytes), { wireBytes: bytes.length });

const services = grpc.loadPackageDefinition(definition).headrace.v1;

// A client of a service. HEADRACE_CA: file with the certificate that vouches for the silo's, for TLS.
function connect(service, address) {
  const ca = process.env.HEADRACE_CA;
  const credentials = ca ? grpc.credentials.createSsl(fs.readFileSync(ca)) : grpc.credentials.createInsecure();
  return new services[service](address, credentials, {
    "grpc.keepalive_time_ms": 10_000, // notice a silo that vanished without a word
    "grpc.keepalive_timeout_ms": 5_000,
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1_000,
  });
}

// Sent with each call. HEADRACE_TOKEN: the token, where the silo wants one.
function metadata() {
  const sent = new grpc.Metadata();
  if (process.env.HEADRACE_TOKEN) sent.set("authorization", `Bearer ${process.env.HEADRACE_TOKEN}`);
  return sent;
}

// An EventBatch is columns: the sizes of all payloads, and the payloads as one.
function batchOf(namespace, key, payloads) {
  return { namespace, key, sizes: payloads.map((one) => one.length), payload: Buffer.concat(payloads) };
}

// The events of a batch as it was delivered, each with its index in the batch as it was published.
function* eventsOf(batch) {
  let start = 0;
  for (const [place, size] of batch.sizes.entries()) {
    yield {
      index: batch.indexes.length ? batch.indexes[place] : place, // not all of them need come
      id: batch.ids[place] ?? "",
      headers: batch.headers[place]?.values ?? {},
      payload: batch.payload.subarray(start, (start += size)),
    };
  }
}

// Whether the same call may succeed later. The silo says so of its own errors; a broken connection may come back.
function retryable(error) {
  const { CANCELLED, DEADLINE_EXCEEDED, INTERNAL, UNAVAILABLE } = grpc.status;
  const told = (key) => (error.metadata?.get(key) ?? []).length > 0;
  if (told("headrace-code")) return told("headrace-retry-after-ms");
  return [CANCELLED, DEADLINE_EXCEEDED, INTERNAL, UNAVAILABLE].includes(error.code);
}

// Wait after so many failures in a row: longer and longer, and not in step with other clients.
function backoff(failures) {
  const limit_ms = Math.min(50 * 2 ** failures, 2_000);
  return new Promise((resume) => setTimeout(resume, (0.5 + Math.random() / 2) * limit_ms));
}

module.exports = { connect, metadata, batchOf, eventsOf, retryable, backoff };
