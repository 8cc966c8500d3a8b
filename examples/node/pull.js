// Prints the events of a subscription, by pulling: node pull.js ADDRESS[,ADDRESS...] SUBSCRIPTION SELECTOR [CONSUMER]
//
// Creates the subscription if it does not exist. Any silo of a cluster passes on the events of the others. If the silo
// ends, the consumer goes on at the next address, or at the same one when it serves again.
"use strict";

const { connect, metadata, eventsOf, reportOf, retryable, backoff } = require("./headrace");

let stopping = false;
let created = false;

function call(client, method, request) {
  const settle = (resolve, reject) => (error, response) => (error ? reject(error) : resolve(response));
  return new Promise((resolve, reject) => client[method](request, metadata(), settle(resolve, reject)));
}

// Pull from one silo until a signal, and then leave the group. The next pull reports what was printed. If it fails, the
// report is kept for the next silo, which ignores it if the queue has moved: then the events come again.
async function consume(address, definition, pull) {
  const [subscriptions, consumers] = ["SubscriptionService", "ConsumerService"].map((name) => connect(name, address));
  try {
    if (!created) await call(subscriptions, "CreateSubscription", { definition });
    created = true; // if the subscription is deleted, it is not created again
    do {
      pull.leave = stopping;
      const { batches, queues } = await call(consumers, "Pull", pull);
      pull.reports = [];
      for (const batch of batches) {
        const events = [...eventsOf(batch)];
        for (const { payload } of events) console.log(`${batch.namespace}/${batch.key} ${payload}`);
        const status = queues.find(({ queue }) => queue === batch.queue);
        pull.reports.push(reportOf(status, batch, events, events.length));
      }
    } while (!pull.leave);
  } finally {
    subscriptions.close();
    consumers.close();
  }
}

async function main(addresses, name, selector, consumer = "c1") {
  if (!selector) throw new Error("usage: node pull.js ADDRESS[,ADDRESS...] SUBSCRIPTION SELECTOR [CONSUMER]");
  for (const signal of ["SIGINT", "SIGTERM"]) process.once(signal, () => (stopping = true));
  const pull = { subscription: name, consumer, wait_ms: 1000, reports: [] };
  const silos = addresses.split(",");
  for (let failures = 0; ; failures++) {
    try {
      return await consume(silos[failures % silos.length], { name, selector, start: { earliest: true } }, pull);
    } catch (error) {
      if (!retryable(error)) throw error;
      console.error(`pull: ${error.details || error.message}: trying again`);
      await backoff(3); // 0.2 to 0.4 s
    }
  }
}

main(...process.argv.slice(2)).catch((error) => {
  console.error(`pull: ${error.details || error.message}`);
  process.exitCode = 1;
});
