// Publishes lines of standard input to a stream: node producer.js ADDRESS NAMESPACE/KEY < FILE
//
// Each request carries the number of this one and of the one before. So a request that was not answered can be sent
// again without storing anything twice, also to a silo that was started anew.
"use strict";

const { randomUUID } = require("node:crypto");
const { connect, metadata, batchOf, retryable, backoff } = require("./headrace");

const MAX_EVENTS = 1000;
const MAX_FAILURES = 15; // in a row: with the pauses in between, a quarter of a minute

class Producer {
  constructor(address) {
    this.client = connect("PublisherService", address);
    this.id = randomUUID();
    this.number = 0;
  }

  // Store events; they are durable when this returns. Tries again as long as that may help.
  async publish(namespace, key, payloads) {
    const sequence = { producer: this.id, number: this.number + 1, previous: this.number };
    const request = { sequence, batches: [batchOf(namespace, key, payloads)] };
    for (let failures = 0; ; failures++) {
      try {
        const response = await this.send(request);
        this.number = sequence.number;
        return response.receipts[0];
      } catch (error) {
        if (!retryable(error) || failures + 1 >= MAX_FAILURES) throw error;
        if (!failures) console.error(`producer: ${error.details || error.message}: trying again`);
        await backoff(failures);
      }
    }
  }

  send(request) {
    return new Promise((resolve, reject) => {
      const options = { deadline: Date.now() + 10_000 };
      this.client.Publish(request, metadata(), options, (error, response) => (error ? reject(error) : resolve(response)));
    });
  }

  close() {
    this.client.close();
  }
}

async function main(address, stream) {
  const [namespace, ...key] = (stream ?? "").split("/");
  if (!key.length) throw new Error("usage: node producer.js ADDRESS NAMESPACE/KEY < FILE");
  const producer = new Producer(address);
  let stored = 0;
  const publish = async (lines) => {
    for (let at = 0; at < lines.length; at += MAX_EVENTS) {
      const payloads = lines.slice(at, at + MAX_EVENTS).map((line) => Buffer.from(line));
      await producer.publish(namespace, key.join("/"), payloads);
      stored += payloads.length;
    }
  };
  let rest = "";
  for await (const chunk of process.stdin.setEncoding("utf8")) {
    const lines = (rest + chunk).split("\n");
    rest = lines.pop();
    await publish(lines); // what came together is stored together
  }
  if (rest) await publish([rest]);
  producer.close();
  console.log(`${stored} ${stored === 1 ? "event is" : "events are"} stored`);
}

main(...process.argv.slice(2)).catch((error) => {
  console.error(`producer: ${error.details || error.message}`);
  process.exitCode = 1;
});
