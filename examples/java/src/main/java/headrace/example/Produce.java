package headrace.example;

import com.google.protobuf.ByteString;
import headrace.v1.Events.EventBatch;
import headrace.v1.Publisher.ProducerSequence;
import headrace.v1.Publisher.PublishRequest;
import headrace.v1.PublisherServiceGrpc;
import io.grpc.StatusRuntimeException;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.UUID;
import java.util.concurrent.TimeUnit;

/**
 * Publishes lines of standard input to a stream: Produce ADDRESS[,ADDRESS...] NAMESPACE/KEY
 *
 * <p>Each request carries its number and that of the one before. So a request that was not answered can be sent again,
 * also to another silo, without storing anything twice.
 */
public final class Produce {
  private static final int MAX_EVENTS = 1000;

  public static void main(String[] args) throws Exception {
    if (args.length != 2 || !args[1].contains("/")) throw new IllegalArgumentException("usage: ADDRESS[,ADDRESS...] NAMESPACE/KEY");
    var stream = args[1].split("/", 2);
    var silos = new Silos(args[0]);
    var sequence = ProducerSequence.newBuilder().setProducer(UUID.randomUUID().toString());
    var input = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    long stored = 0;
    for (var line = input.readLine(); line != null; line = input.readLine()) {
      var lines = new ArrayList<>(List.of(line)); // lines that came together are stored together
      while (lines.size() < MAX_EVENTS && input.ready()) lines.add(input.readLine());
      sequence.setPrevious(sequence.getNumber()).setNumber(sequence.getNumber() + 1);
      var batch = batch(stream[0], stream[1], lines);
      publish(silos, PublishRequest.newBuilder().setSequence(sequence).addBatches(batch).build());
      stored += lines.size();
    }
    silos.close();
    System.out.println(stored + " events are stored");
  }

  /** A batch is columns: the sizes of all payloads, and the payloads as one. */
  private static EventBatch batch(String namespace, String key, List<String> lines) {
    var batch = EventBatch.newBuilder().setNamespace(namespace).setKey(key);
    var payloads = lines.stream().map(ByteString::copyFromUtf8).toList();
    payloads.forEach(payload -> batch.addSizes(payload.size()));
    return batch.setPayload(ByteString.copyFrom(payloads)).build();
  }

  /** Returns when the events are durable. Tries the silos in turn, as long as that may help. */
  private static void publish(Silos silos, PublishRequest request) throws InterruptedException {
    while (true) {
      try {
        PublisherServiceGrpc.newBlockingStub(silos.current()).withDeadlineAfter(10, TimeUnit.SECONDS).publish(request);
        return;
      } catch (StatusRuntimeException error) {
        silos.next(error);
      }
    }
  }
}
