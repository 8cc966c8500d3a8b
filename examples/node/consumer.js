// Prints the events of a subscription: node consumer.js ADDRESS SUBSCRIPTION SELECTOR [CONSUMER]
//
// The subscription is created where it does not exist. Start it twice and both share the events. It can be killed at
// any moment: what it had not acknowledged comes again, to it or to another.
"use strict";

const { connect, metadata, eventsOf, retryable, backoff } = require("./headrace");

// So much may be on its way to us, and in our hands, at a time.
const CREDIT = { events: 1000, bytes: 4 << 20 };

class Consumer {
  // `handle` is called with each event and the batch it came in, one after the other, in order within a stream. When
  // it throws, `run` does. (A consumer that wants to be given an event again, later, sends a Rejection.)
  constructor(address, definition, id, handle) {
    this.client = connect("ConsumerService", address);
    this.open = { definition, consumer: id };
    this.handle = handle;
    this.failures = 0;
    this.stopping = false;
    this.call = null;
  }

  // Goes on over broken connections. Returns after `stop`, when the silo has saved what was acknowledged.
  async run() {
    try {
      while (!this.stopping) {
        try {
          await this.session();
        } catch (error) {
          if (!retryable(error)) throw error;
          if (!this.failures) console.error(`consumer: ${error.details || error.message}: trying again`);
        }
        if (!this.stopping) await backoff(this.failures++);
      }
    } finally {
      this.client.close();
    }
  }

  stop() {
    this.stopping = true;
    this.call?.write({ close: true });
  }

  // One connection, until it ends in order or breaks.
  async session() {
    const call = this.client.Subscribe(metadata());
    call.on("error", () => {}); // it is thrown below; this is for one that comes when nobody reads any more
    call.write({ open: this.open, credit: CREDIT });
    this.call = call;
    let heartbeat;
    let closing = false;
    try {
      for await (const response of call) {
        if (response.opened) {
          this.failures = 0;
          this.open.consumer = response.opened.consumer; // so that we are known when we come back
          heartbeat = setInterval(() => call.write({}), response.opened.heartbeat_ms);
        }
        if (response.closing) {
          closing = true; // the silo stops: go on with another one, or with this one when it is back
          call.write({ close: true });
        }
        if (response.batches.length && !closing && !this.stopping) await this.process(call, response);
      }
    } finally {
      clearInterval(heartbeat);
      this.call = null;
      call.cancel();
    }
  }

  // Handle the events, then say that they are done, and that there is room for as much again.
  async process(call, { batches, wireBytes }) {
    const acknowledgements = [];
    let events = 0;
    for (const batch of batches) {
      for (const event of eventsOf(batch)) {
        await this.handle(event, batch);
        events++;
      }
      acknowledgements.push({ queue: batch.queue, offset: batch.offset }); // all of it; it could also be some events
    }
    call.write({ acknowledgements, credit: { events, bytes: wireBytes } });
  }
}

async function main(address, name, selector, id) {
  if (!selector) throw new Error("usage: node consumer.js ADDRESS SUBSCRIPTION SELECTOR [CONSUMER]");
  const definition = { name, selector, start: { earliest: true } };
  const consumer = new Consumer(address, definition, id ?? "", (event, batch) => {
    console.log(`${batch.namespace}/${batch.key} ${event.payload}`);
  });
  for (const signal of ["SIGINT", "SIGTERM"]) process.once(signal, () => consumer.stop());
  await consumer.run();
}

main(...process.argv.slice(2)).catch((error) => {
  console.error(`consumer: ${error.details || error.message}`);
  process.exitCode = 1;
});
