// Prints the events of a subscription: node consumer.js ADDRESS[,ADDRESS...] SUBSCRIPTION SELECTOR [CONSUMER]
//
// Creates the subscription if it does not exist. Start it twice, and both consumers share the events. You can kill it at
// any moment: events that it had not acknowledged come again, to it or to another consumer.
"use strict";

const { connect, metadata, ended, eventsOf, reportOf, newest, openAgain, retryable, backoff } = require("./headrace");

// The most that each session holds: on the way to us, waiting, and being handled.
const CREDIT = { events: 1000, bytes: 4 << 20 };

// One call of Subscribe: a silo delivers the queues that it owns.
class Session {
  constructor(consumer, silo, address) {
    this.consumer = consumer;
    this.silo = silo; // its name in the placement; "" until the silo tells it
    this.statuses = new Map(); // the last one of each queue
    this.work = Promise.resolve(); // the end of the work on all batches that have come
    this.client = connect("ConsumerService", address);
    this.call = this.client.Subscribe(metadata());
  }

  // Returns when the session has ended in order. Otherwise throws its error, or that of the handler.
  async run() {
    this.call.write({ open: this.consumer.open, credit: CREDIT });
    try {
      await ended(this.call, (response) => this.hear(response));
    } finally {
      this.closing = this.closed = true;
      clearInterval(this.heartbeat);
      this.client.close();
    }
  }

  async hear({ opened, queues, placement, batches }) {
    if (opened) {
      this.silo ||= opened.silo;
      this.heartbeat = setInterval(() => this.closed || this.call.write({}), opened.heartbeat_ms);
      this.consumer.failures = 0;
      this.consumer.open = openAgain(this.consumer.definition, opened); // all sessions are of the same consumer
    }
    for (const status of queues) {
      const before = this.statuses.get(status.queue);
      if (before) before.over = true; // the queue moves, or a seek moved the subscription
      this.statuses.set(status.queue, status);
    }
    if (placement) this.consumer.follow(placement.owners);
    for (const batch of batches) {
      const status = this.statuses.get(batch.queue);
      this.work = this.work.then(() => this.process(batch, status));
    }
    await this.work;
  }

  // Handle the events of a batch while its status holds. Release the others: they come again.
  async process(batch, status) {
    const events = [...eventsOf(batch)];
    let done = 0;
    while (done < events.length && !status.over && !this.closing) await this.consumer.handle(events[done++], batch);
    if (!this.unsent) {
      this.unsent = { reports: [], credit: { events: 0, bytes: 0 } };
      setImmediate(() => this.send()); // one request for all batches that are processed by then
    }
    this.unsent.reports.push(reportOf(status, batch, events, done));
    this.unsent.credit.events += events.length;
    this.unsent.credit.bytes += batch.wireBytes;
  }

  send(close = false) {
    if (!this.closed) this.call.write({ ...this.unsent, close });
    this.closed ||= close; // nothing may follow
    this.unsent = null;
  }

  close() {
    this.closing = true;
    this.work = this.work.then(() => this.send(true));
    this.work.catch(() => {}); // `hear` throws it
  }
}

// A session with each owner of queues. `handle` is called with each event and its batch, in order within a stream. If it
// throws, `run` does. (A consumer that wants to get an event again later sends a Rejection.)
class Consumer {
  constructor(addresses, definition, id, handle) {
    this.addresses = addresses; // of silos: the given ones, and those of owners
    this.definition = definition;
    this.open = { definition, consumer: id, direct: true };
    this.handle = handle;
    this.sessions = [];
    this.failures = 0;
    this.over = new Promise((resolve, reject) => (this.end = (error) => (error ? reject(error) : resolve())));
  }

  // Goes on over broken connections. Returns after `stop`, when the silos have saved the acknowledgements.
  run() {
    this.follow([]);
    return this.over;
  }

  // Open the sessions that are missing, and close those with silos that own nothing.
  follow(owners) {
    this.owners = owners.length ? newest(this.owners, owners) : [];
    if (this.stopping) return;
    const named = this.owners.filter(({ silo }) => silo);
    for (const { silo, address } of named) {
      if (!this.addresses.includes(address)) this.addresses.push(address);
      if (!this.sessions.some((session) => session.silo === silo)) this.begin(silo, address);
    }
    const idle = (session) => named.length && !named.some(({ silo }) => silo === session.silo);
    for (const session of this.sessions.filter(idle)) session.close();
    if (!this.sessions.length) this.begin("", this.addresses[this.failures % this.addresses.length]);
  }

  async begin(silo, address) {
    let session;
    try {
      session = new Session(this, silo, address);
      this.sessions.push(session);
      await session.run();
    } catch (error) {
      if (!retryable(error)) this.stop(error);
      else if (!this.failures++) console.error(`consumer: ${error.details || error.message}: trying again`);
    }
    this.sessions = this.sessions.filter((other) => other !== session);
    if (this.stopping && !this.sessions.length) this.end();
    if (!this.stopping) await backoff(this.failures);
    this.follow(this.sessions.length ? this.owners : []); // without a session, the owners are unknown
  }

  stop(error) {
    this.stopping = true;
    for (const session of this.sessions) session.close();
    if (error || !this.sessions.length) this.end(error);
  }
}

async function main(addresses, name, selector, id) {
  if (!selector) throw new Error("usage: node consumer.js ADDRESS[,ADDRESS...] SUBSCRIPTION SELECTOR [CONSUMER]");
  const print = (event, batch) => console.log(`${batch.namespace}/${batch.key} ${event.payload}`);
  const consumer = new Consumer(addresses.split(","), { name, selector, start: { earliest: true } }, id ?? "", print);
  for (const signal of ["SIGINT", "SIGTERM"]) process.once(signal, () => consumer.stop());
  await consumer.run();
}

main(...process.argv.slice(2)).catch((error) => {
  console.error(`consumer: ${error.details || error.message}`);
  process.exitCode = 1;
});
