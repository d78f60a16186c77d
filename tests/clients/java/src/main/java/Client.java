import com.google.protobuf.ByteString;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.RetryInfo;
import inference.GRPCInferenceServiceGrpc;
import inference.GRPCInferenceServiceGrpc.GRPCInferenceServiceBlockingStub;
import inference.GRPCInferenceServiceGrpc.GRPCInferenceServiceStub;
import inference.GrpcService.InferTensorContents;
import inference.GrpcService.ModelInferRequest;
import inference.GrpcService.ModelInferRequest.InferInputTensor;
import inference.GrpcService.ModelInferResponse;
import inference.GrpcService.ModelMetadataRequest;
import inference.GrpcService.ModelMetadataResponse;
import inference.GrpcService.ModelStreamInferResponse;
import inference.GrpcService.ServerLiveRequest;
import io.grpc.ChannelCredentials;
import io.grpc.ConnectivityState;
import io.grpc.Context;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.TlsChannelCredentials;
import io.grpc.protobuf.StatusProto;
import io.grpc.stub.StreamObserver;
import java.io.File;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Executors;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.stream.IntStream;

/** Calls of an inference client with grpc-java; prints "ok NAME" for each group of calls. Arguments: HOST:PORT [CA.pem]. */
public final class Client {
  private static final int CONCURRENT_CALLS = 1000;
  private static final int STREAM_MESSAGES = 100;
  private static final int LARGE_ELEMENTS = 2 << 20;

  private static String address;
  private static ChannelCredentials security;

  private Client() {}

  private static void require(boolean condition, String what, Object got) {
    if (!condition) {
      throw new AssertionError(what + ": " + got);
    }
  }

  private static ManagedChannelBuilder<?> builder() {
    return Grpc.newChannelBuilder(address, security).maxInboundMessageSize(16 << 20);
  }

  private static ByteString encode(int... values) {
    ByteBuffer buffer = ByteBuffer.allocate(4 * values.length).order(ByteOrder.LITTLE_ENDIAN);
    buffer.asIntBuffer().put(values);
    return ByteString.copyFrom(buffer);
  }

  private static ByteString encode(float... values) {
    ByteBuffer buffer = ByteBuffer.allocate(4 * values.length).order(ByteOrder.LITTLE_ENDIAN);
    buffer.asFloatBuffer().put(values);
    return ByteString.copyFrom(buffer);
  }

  private static InferInputTensor.Builder input(String name, String datatype, long columns) {
    return InferInputTensor.newBuilder().setName(name).setDatatype(datatype).addShape(1).addShape(columns);
  }

  /** A request of sum_difference: SUM = A + B, DIFFERENCE = A - B. */
  private static ModelInferRequest request(String id, int a, float b, boolean typed) {
    ModelInferRequest.Builder request = ModelInferRequest.newBuilder().setModelName("sum_difference").setId(id);
    InferInputTensor.Builder first = input("A", "INT32", 4);
    InferInputTensor.Builder second = input("B", "FP32", 4);
    if (typed) {
      first.setContents(InferTensorContents.newBuilder().addAllIntContents(List.of(a, 1, 2, 3)));
      second.setContents(InferTensorContents.newBuilder().addAllFp32Contents(List.of(b, 0.5f, -2f, 1e6f)));
      return request.addInputs(first).addInputs(second).build();
    }
    request.addInputs(first).addInputs(second);
    return request.addRawInputContents(encode(a, 1, 2, 3)).addRawInputContents(encode(b, 0.5f, -2f, 1e6f)).build();
  }

  private static void verify(ModelInferResponse response, String id, int a, float b) {
    Map<String, ByteString> expected =
        Map.of(
            "SUM", encode(a + b, 1.5f, 0f, 1000003f),
            "DIFFERENCE", encode(a - b, 0.5f, 4f, -999997f));
    require(response.getId().equals(id) && response.getOutputsCount() == 2, "response " + id, response);
    for (int index = 0; index < 2; index++) {
      ModelInferResponse.InferOutputTensor output = response.getOutputs(index);
      require(output.getDatatype().equals("FP32"), output.getName(), output);
      require(response.getRawOutputContents(index).equals(expected.get(output.getName())), output.getName(), response);
    }
  }

  private static ModelInferRequest patient(String model) {
    return ModelInferRequest.newBuilder()
        .setModelName(model)
        .addInputs(input("X", "FP32", 16))
        .addRawInputContents(encode(new float[16]))
        .build();
  }

  private static void unary(GRPCInferenceServiceBlockingStub stub) {
    require(stub.serverLive(ServerLiveRequest.getDefaultInstance()).getLive(), "live", false);
    System.out.println("ok live");
    ModelMetadataResponse metadata =
        stub.modelMetadata(ModelMetadataRequest.newBuilder().setName("sum_difference").build());
    require(metadata.getName().equals("sum_difference") && metadata.getOutputsCount() == 2, "metadata", metadata);
    require(metadata.getInputs(0).getDatatype().equals("INT32"), "metadata", metadata);
    require(metadata.getInputs(0).getShape(1) == 4, "metadata", metadata);
    System.out.println("ok metadata");
    for (String name : List.of("raw", "typed", "gzip")) {
      GRPCInferenceServiceBlockingStub chosen = name.equals("gzip") ? stub.withCompression("gzip") : stub;
      verify(chosen.modelInfer(request(name, 7, 2.25f, name.equals("typed"))), name, 7, 2.25f);
      System.out.println("ok " + name);
    }
  }

  private static void concurrent(GRPCInferenceServiceStub stub) throws Exception {
    List<CompletableFuture<ModelInferResponse>> results =
        IntStream.range(0, CONCURRENT_CALLS)
            .mapToObj(
                number -> {
                  CompletableFuture<ModelInferResponse> result = new CompletableFuture<>();
                  ModelInferRequest request = request(Integer.toString(number), number, 0.5f, number % 2 == 0);
                  stub.modelInfer(
                      request,
                      new StreamObserver<>() {
                        @Override
                        public void onNext(ModelInferResponse response) {
                          result.complete(response);
                        }

                        @Override
                        public void onError(Throwable error) {
                          result.completeExceptionally(error);
                        }

                        @Override
                        public void onCompleted() {}
                      });
                  return result;
                })
            .toList();
    for (int number = 0; number < CONCURRENT_CALLS; number++) {
      verify(results.get(number).get(60, TimeUnit.SECONDS), Integer.toString(number), number, 0.5f);
    }
    System.out.println("ok concurrent");
  }

  private static void stream(GRPCInferenceServiceStub stub) throws Exception {
    AtomicInteger received = new AtomicInteger();
    CompletableFuture<Void> done = new CompletableFuture<>();
    StreamObserver<ModelInferRequest> requests =
        stub.modelStreamInfer(
            new StreamObserver<>() {
              @Override
              public void onNext(ModelStreamInferResponse message) {
                int number = received.getAndIncrement();
                require(message.getErrorMessage().isEmpty(), "stream", message.getErrorMessage());
                verify(message.getInferResponse(), Integer.toString(number), number, 0.25f);
              }

              @Override
              public void onError(Throwable error) {
                done.completeExceptionally(error);
              }

              @Override
              public void onCompleted() {
                done.complete(null);
              }
            });
    for (int number = 0; number < STREAM_MESSAGES; number++) {
      requests.onNext(request(Integer.toString(number), number, 0.25f, false));
    }
    requests.onCompleted();
    done.get(60, TimeUnit.SECONDS);
    require(received.get() == STREAM_MESSAGES, "stream", received);
    System.out.println("ok stream");
  }

  private static StatusRuntimeException failure(Runnable call) {
    try {
      call.run();
    } catch (StatusRuntimeException error) {
      return error;
    }
    throw new AssertionError("the call did not fail");
  }

  private static void failures(GRPCInferenceServiceBlockingStub stub) throws InvalidProtocolBufferException {
    ModelInferRequest patient = patient("patient");
    StatusRuntimeException error =
        failure(() -> stub.withDeadlineAfter(200, TimeUnit.MILLISECONDS).modelInfer(patient));
    require(error.getStatus().getCode() == Status.Code.DEADLINE_EXCEEDED, "deadline", error);
    System.out.println("ok deadline");

    ScheduledExecutorService timer = Executors.newSingleThreadScheduledExecutor();
    Context.CancellableContext context = Context.current().withCancellation();
    timer.schedule(() -> context.cancel(null), 100, TimeUnit.MILLISECONDS);
    error = failure(() -> context.run(() -> stub.modelInfer(patient)));
    timer.shutdown();
    require(error.getStatus().getCode() == Status.Code.CANCELLED, "cancel", error);
    verify(stub.modelInfer(request("after", 1, 1f, false)), "after", 1, 1f);
    System.out.println("ok cancel");

    error = failure(() -> stub.modelInfer(ModelInferRequest.newBuilder().setModelName("absent").build()));
    require(error.getStatus().getCode() == Status.Code.NOT_FOUND, "not_found", error);
    require(error.getStatus().getDescription().contains("'absent'"), "not_found", error);
    System.out.println("ok not_found");

    // The quota is one request in an hour.
    Iterator<Integer> tries = List.of(1, 2).iterator();
    error = null;
    while (error == null && tries.hasNext()) {
      tries.next();
      try {
        stub.modelInfer(patient("limited"));
      } catch (StatusRuntimeException refused) {
        error = refused;
      }
    }
    require(error != null && error.getStatus().getCode() == Status.Code.RESOURCE_EXHAUSTED, "details", error);
    com.google.rpc.Status status = StatusProto.fromThrowable(error);
    require(status != null && status.getDetailsCount() == 2, "details", status);
    require(status.getDetails(0).unpack(RetryInfo.class).getRetryDelay().getSeconds() > 60, "details", status);
    System.out.println("ok details");
  }

  private static void large(GRPCInferenceServiceBlockingStub stub) {
    float[] values = new float[LARGE_ELEMENTS];
    for (int index = 0; index < LARGE_ELEMENTS; index++) {
      values[index] = index;
    }
    ByteString content = encode(values);
    ModelInferRequest request =
        ModelInferRequest.newBuilder()
            .setModelName("identity")
            .addInputs(input("X", "FP32", LARGE_ELEMENTS))
            .addRawInputContents(content)
            .build();
    require(stub.modelInfer(request).getRawOutputContents(0).equals(content), "large", "other bytes");
    System.out.println("ok large");
  }

  /** Calls on a connection that is silent, but for pings, for longer than their interval and timeout together. */
  private static void pings() {
    ManagedChannel channel =
        builder()
            .keepAliveTime(10, TimeUnit.SECONDS)
            .keepAliveTimeout(4, TimeUnit.SECONDS)
            .keepAliveWithoutCalls(true)
            .build();
    GRPCInferenceServiceBlockingStub stub = GRPCInferenceServiceGrpc.newBlockingStub(channel);
    stub.serverLive(ServerLiveRequest.getDefaultInstance());
    CountDownLatch changed = new CountDownLatch(1);
    channel.notifyWhenStateChanged(ConnectivityState.READY, changed::countDown);
    try {
      require(!changed.await(15, TimeUnit.SECONDS), "keepalive", "the connection was closed");
    } catch (InterruptedException error) {
      throw new AssertionError(error);
    }
    stub.serverLive(ServerLiveRequest.getDefaultInstance());
    channel.shutdownNow();
  }

  /** See the class. */
  public static void main(String[] words) throws Exception {
    address = words[0];
    security =
        words.length > 1
            ? TlsChannelCredentials.newBuilder().trustManager(new File(words[1])).build()
            : InsecureChannelCredentials.create();
    CompletableFuture<Void> pings = CompletableFuture.runAsync(Client::pings);
    ManagedChannel channel = builder().build();
    GRPCInferenceServiceBlockingStub stub = GRPCInferenceServiceGrpc.newBlockingStub(channel);
    unary(stub);
    concurrent(GRPCInferenceServiceGrpc.newStub(channel));
    stream(GRPCInferenceServiceGrpc.newStub(channel));
    failures(stub);
    large(stub);
    pings.get(30, TimeUnit.SECONDS);
    System.out.println("ok keepalive");
    channel.shutdownNow();
  }
}
