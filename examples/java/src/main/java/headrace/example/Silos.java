package headrace.example;

import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import java.util.List;
import java.util.stream.Stream;

/** Connections to the silos, of which one is used. */
final class Silos {
  /** A connection that is closed while grpc-java writes to it is UNKNOWN. */
  private static final List<Status.Code> RETRYABLE = List.of(
      Status.Code.UNAVAILABLE, Status.Code.RESOURCE_EXHAUSTED, Status.Code.DEADLINE_EXCEEDED, Status.Code.UNKNOWN);

  private final List<ManagedChannel> channels;
  private int failures;

  Silos(String addresses) {
    channels = Stream.of(addresses.split(","))
        .map(address -> Grpc.newChannelBuilder(address, InsecureChannelCredentials.create()).build()).toList();
  }

  ManagedChannel current() {
    return channels.get(failures % channels.size());
  }

  /** Goes on with the next silo after a pause. Throws the error if another attempt cannot help. */
  void next(StatusRuntimeException error) throws InterruptedException {
    if (!RETRYABLE.contains(error.getStatus().getCode())) throw error;
    System.err.println(error.getMessage() + ": trying again");
    failures++;
    Thread.sleep(200);
  }

  void close() {
    channels.forEach(ManagedChannel::shutdownNow);
  }
}
