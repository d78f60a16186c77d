// Calls of an inference client with grpc++; prints "ok NAME" for each group of calls, or the fault.
//
// Usage: client HOST:PORT [CA.pem]
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstring>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "grpc_service.grpc.pb.h"

namespace {

using inference::GRPCInferenceService;
using inference::ModelInferRequest;
using inference::ModelInferResponse;

constexpr int kConcurrentCalls = 1000;
constexpr int kStreamMessages = 100;
constexpr int kLargeElements = 2 << 20;

void Require(bool condition, const std::string& what, const std::string& got) {
  if (!condition) {
    std::cout << "fault in " << what << ": " << got << std::endl;
    std::_Exit(1);
  }
}

void Check(const grpc::Status& status, const std::string& what) {
  Require(status.ok(), what, std::to_string(status.error_code()) + " " + status.error_message());
}

template <typename T>
std::string Encode(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

void SetDeadline(grpc::ClientContext* context, int milliseconds = 60000) {
  context->set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(milliseconds));
}

ModelInferRequest::InferInputTensor* AddInput(ModelInferRequest* request, const std::string& name,
                                              const std::string& datatype, int64_t columns) {
  auto* input = request->add_inputs();
  input->set_name(name);
  input->set_datatype(datatype);
  input->add_shape(1);
  input->add_shape(columns);
  return input;
}

// A request of sum_difference: SUM = A + B, DIFFERENCE = A - B.
ModelInferRequest Request(const std::string& id, int32_t a, float b, bool typed) {
  const std::vector<int32_t> as = {a, 1, 2, 3};
  const std::vector<float> bs = {b, 0.5f, -2.0f, 1e6f};
  ModelInferRequest request;
  request.set_model_name("sum_difference");
  request.set_id(id);
  auto* first = AddInput(&request, "A", "INT32", 4);
  auto* second = AddInput(&request, "B", "FP32", 4);
  if (typed) {
    first->mutable_contents()->mutable_int_contents()->Add(as.begin(), as.end());
    // Protocol buffers may move the first input when the second is added, not its contents.
    second->mutable_contents()->mutable_fp32_contents()->Add(bs.begin(), bs.end());
  } else {
    request.add_raw_input_contents(Encode(as));
    request.add_raw_input_contents(Encode(bs));
  }
  return request;
}

void Verify(const ModelInferResponse& response, const std::string& id, int32_t a, float b) {
  const std::map<std::string, std::vector<float>> expected = {
      {"SUM", {a + b, 1.5f, 0.0f, 1000003.0f}}, {"DIFFERENCE", {a - b, 0.5f, 4.0f, -999997.0f}}};
  Require(response.id() == id && response.outputs_size() == 2, "response " + id, response.ShortDebugString());
  for (int index = 0; index < 2; ++index) {
    const auto& output = response.outputs(index);
    Require(output.datatype() == "FP32" && expected.count(output.name()) == 1 &&
                response.raw_output_contents(index) == Encode(expected.at(output.name())),
            "response " + id, response.ShortDebugString());
  }
}

ModelInferRequest Patient(const std::string& model) {
  ModelInferRequest request;
  request.set_model_name(model);
  AddInput(&request, "X", "FP32", 16);
  request.add_raw_input_contents(std::string(64, '\0'));
  return request;
}

std::shared_ptr<grpc::ChannelCredentials> security;
std::string address;

std::shared_ptr<grpc::Channel> Connect(grpc::ChannelArguments arguments = {}) {
  arguments.SetMaxReceiveMessageSize(16 << 20);
  return grpc::CreateCustomChannel(address, security, arguments);
}

void Unary(GRPCInferenceService::Stub* stub) {
  {
    grpc::ClientContext context;
    SetDeadline(&context);
    inference::ServerLiveResponse response;
    Check(stub->ServerLive(&context, {}, &response), "live");
    Require(response.live(), "live", "false");
    std::cout << "ok live" << std::endl;
  }
  {
    grpc::ClientContext context;
    SetDeadline(&context);
    inference::ModelMetadataRequest request;
    inference::ModelMetadataResponse response;
    request.set_name("sum_difference");
    Check(stub->ModelMetadata(&context, request, &response), "metadata");
    Require(response.name() == "sum_difference" && response.inputs_size() == 2 && response.outputs_size() == 2 &&
                response.inputs(0).datatype() == "INT32" && response.inputs(0).shape(1) == 4,
            "metadata", response.ShortDebugString());
    std::cout << "ok metadata" << std::endl;
  }
  for (const std::string name : {"raw", "typed", "gzip"}) {
    grpc::ClientContext context;
    SetDeadline(&context);
    if (name == "gzip") context.set_compression_algorithm(GRPC_COMPRESS_GZIP);
    ModelInferResponse response;
    Check(stub->ModelInfer(&context, Request(name, 7, 2.25f, name == "typed"), &response), name);
    Verify(response, name, 7, 2.25f);
    std::cout << "ok " << name << std::endl;
  }
}

void Concurrent(GRPCInferenceService::Stub* stub) {
  struct Call {
    grpc::ClientContext context;
    grpc::Status status;
    ModelInferResponse response;
    std::unique_ptr<grpc::ClientAsyncResponseReader<ModelInferResponse>> reader;
  };
  grpc::CompletionQueue queue;
  std::vector<Call> calls(kConcurrentCalls);
  for (int number = 0; number < kConcurrentCalls; ++number) {
    Call& call = calls[number];
    SetDeadline(&call.context);
    call.reader = stub->AsyncModelInfer(&call.context, Request(std::to_string(number), number, 0.5f, number % 2 == 0),
                                        &queue);
    call.reader->Finish(&call.response, &call.status, reinterpret_cast<void*>(static_cast<intptr_t>(number)));
  }
  for (int done = 0; done < kConcurrentCalls; ++done) {
    void* tag = nullptr;
    bool ok = false;
    Require(queue.Next(&tag, &ok) && ok, "concurrent", "the queue ended");
    const int number = static_cast<int>(reinterpret_cast<intptr_t>(tag));
    Check(calls[number].status, "concurrent");
    Verify(calls[number].response, std::to_string(number), number, 0.5f);
  }
  std::cout << "ok concurrent" << std::endl;
}

void Stream(GRPCInferenceService::Stub* stub) {
  grpc::ClientContext context;
  SetDeadline(&context);
  auto stream = stub->ModelStreamInfer(&context);
  std::thread writer([&stream] {
    for (int number = 0; number < kStreamMessages; ++number) {
      Require(stream->Write(Request(std::to_string(number), number, 0.25f, false)), "stream", "the stream ended");
    }
    stream->WritesDone();
  });
  inference::ModelStreamInferResponse message;
  int number = 0;
  for (; stream->Read(&message); ++number) {
    Require(message.error_message().empty(), "stream", message.error_message());
    Verify(message.infer_response(), std::to_string(number), number, 0.25f);
  }
  writer.join();
  Check(stream->Finish(), "stream");
  Require(number == kStreamMessages, "stream", std::to_string(number));
  std::cout << "ok stream" << std::endl;
}

grpc::Status Infer(GRPCInferenceService::Stub* stub, const ModelInferRequest& request, int milliseconds = 60000) {
  grpc::ClientContext context;
  SetDeadline(&context, milliseconds);
  ModelInferResponse response;
  return stub->ModelInfer(&context, request, &response);
}

void Failures(GRPCInferenceService::Stub* stub) {
  grpc::Status status = Infer(stub, Patient("patient"), 200);
  Require(status.error_code() == grpc::DEADLINE_EXCEEDED, "deadline", status.error_message());
  std::cout << "ok deadline" << std::endl;

  grpc::ClientContext context;
  std::thread canceller([&context] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    context.TryCancel();
  });
  ModelInferResponse response;
  status = stub->ModelInfer(&context, Patient("patient"), &response);
  canceller.join();
  Require(status.error_code() == grpc::CANCELLED, "cancel", status.error_message());
  Check(Infer(stub, Request("after", 1, 1.0f, false)), "after cancel");
  std::cout << "ok cancel" << std::endl;

  ModelInferRequest absent;
  absent.set_model_name("absent");
  status = Infer(stub, absent);
  Require(status.error_code() == grpc::NOT_FOUND && status.error_message().find("'absent'") != std::string::npos,
          "not_found", status.error_message());
  std::cout << "ok not_found" << std::endl;

  // The quota is one request in an hour.
  Infer(stub, Patient("limited"));
  status = Infer(stub, Patient("limited"));
  Require(status.error_code() == grpc::RESOURCE_EXHAUSTED &&
              status.error_details().find("type.googleapis.com/google.rpc.RetryInfo") != std::string::npos,
          "details", status.error_message());
  std::cout << "ok details" << std::endl;
}

void Large(GRPCInferenceService::Stub* stub) {
  std::vector<float> values(kLargeElements);
  for (int index = 0; index < kLargeElements; ++index) values[index] = static_cast<float>(index);
  ModelInferRequest request;
  request.set_model_name("identity");
  AddInput(&request, "X", "FP32", kLargeElements);
  request.add_raw_input_contents(Encode(values));
  grpc::ClientContext context;
  SetDeadline(&context);
  ModelInferResponse response;
  Check(stub->ModelInfer(&context, request, &response), "large");
  Require(response.raw_output_contents_size() == 1 && response.raw_output_contents(0) == request.raw_input_contents(0),
          "large", "other bytes");
  std::cout << "ok large" << std::endl;
}

// Calls on a connection that is silent, but for pings, for several times their interval and timeout.
void Pings() {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 1000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 4000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  auto channel = Connect(arguments);
  auto stub = GRPCInferenceService::NewStub(channel);
  Check(Infer(stub.get(), Request("before", 1, 1.0f, false)), "keepalive");
  const auto end = std::chrono::system_clock::now() + std::chrono::seconds(9);
  Require(!channel->WaitForStateChange(GRPC_CHANNEL_READY, end), "keepalive", "the connection was closed");
  Check(Infer(stub.get(), Request("after", 1, 1.0f, false)), "keepalive");
}

}  // namespace

int main(int count, char** words) {
  address = words[1];
  security = grpc::InsecureChannelCredentials();
  if (count > 2) {
    std::stringstream authority;
    authority << std::ifstream(words[2]).rdbuf();
    grpc::SslCredentialsOptions options;
    options.pem_root_certs = authority.str();
    security = grpc::SslCredentials(options);
  }
  std::thread pings(Pings);
  auto stub = GRPCInferenceService::NewStub(Connect());
  Unary(stub.get());
  Concurrent(stub.get());
  Stream(stub.get());
  Failures(stub.get());
  Large(stub.get());
  pings.join();
  std::cout << "ok keepalive" << std::endl;
  return 0;
}
