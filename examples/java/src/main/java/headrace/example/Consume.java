package headrace.example;

import headrace.v1.Consumer.*;
import headrace.v1.ConsumerServiceGrpc;
import headrace.v1.Events.EventBatch;
import headrace.v1.SubscriptionServiceGrpc;
import headrace.v1.Subscriptions.*;
import io.grpc.ManagedChannel;
import io.grpc.StatusRuntimeException;

/**
 * Prints the events of a subscription: Consume ADDRESS[,ADDRESS...] SUBSCRIPTION SELECTOR [CONSUMER]
 *
 * <p>Creates the subscription if it does not exist. Any silo of a cluster passes on the events of the others. If the silo
 * ends, the consumer goes on at the next address, or at the same one when it serves again.
 */
public final class Consume {
  private static volatile boolean stopping;
  private static boolean created; // if the subscription is deleted, it is not created again

  public static void main(String[] args) throws Exception {
    if (args.length < 3) throw new IllegalArgumentException("usage: ADDRESS[,ADDRESS...] SUBSCRIPTION SELECTOR [CONSUMER]");
    var main = Thread.currentThread();
    Runtime.getRuntime().addShutdownHook(new Thread(() -> { // SIGTERM or Ctrl-C: leave the group before the end
      stopping = true;
      try {
        main.join();
      } catch (InterruptedException ignored) { // the end does not wait any longer
      }
    }));
    var definition = SubscriptionDefinition.newBuilder().setName(args[1]).setSelector(args[2])
        .setStart(Start.newBuilder().setEarliest(true)).build();
    var pull = PullRequest.newBuilder().setSubscription(args[1]).setConsumer(args.length > 3 ? args[3] : "c1").setWaitMs(1000);
    var silos = new Silos(args[0]);
    while (true) {
      try {
        consume(silos.current(), definition, pull);
        silos.close();
        return;
      } catch (StatusRuntimeException error) {
        silos.next(error);
      }
    }
  }

  /**
   * Pulls from one silo until a signal, and then leaves the group. The next pull reports what was printed. If it fails, the
   * report is kept for the next silo, which ignores it if the queue has moved: then the events come again.
   */
  private static void consume(ManagedChannel silo, SubscriptionDefinition definition, PullRequest.Builder pull) {
    if (!created) {
      SubscriptionServiceGrpc.newBlockingStub(silo)
          .createSubscription(CreateSubscriptionRequest.newBuilder().setDefinition(definition).build());
      created = true;
    }
    do {
      var response = ConsumerServiceGrpc.newBlockingStub(silo).pull(pull.setLeave(stopping).build());
      pull.clearReports();
      for (var batch : response.getBatchesList()) {
        print(batch);
        pull.addReports(report(batch, response));
      }
    } while (!pull.getLeave());
  }

  /** A batch is columns: the sizes of all payloads, and the payloads as one. */
  private static void print(EventBatch batch) {
    int start = 0;
    for (int size : batch.getSizesList()) {
      var payload = batch.getPayload().substring(start, start += size).toStringUtf8();
      System.out.println(batch.getNamespace() + "/" + batch.getKey() + " " + payload);
    }
  }

  /** Acknowledges all events of a batch, under the epoch and the generation of its queue. */
  private static QueueReport report(EventBatch batch, PullResponse response) {
    var done = Acknowledgement.newBuilder().setOffset(batch.getOffset());
    int count = batch.getIndexesCount();
    if (count > 0) { // only some events of the published batch were delivered
      done.setIndex(batch.getIndexes(0)).setCount(batch.getIndexes(count - 1) + 1 - batch.getIndexes(0));
    }
    var status = response.getQueuesList().stream().filter(each -> each.getQueue() == batch.getQueue()).findFirst().orElseThrow();
    return QueueReport.newBuilder().setQueue(batch.getQueue()).setEpoch(status.getEpoch())
        .setGeneration(status.getGeneration()).addAcknowledgements(done).build();
  }
}
