// Calls of an inference client with grpc-go; prints "ok NAME" for each group of calls, or the fault.
//
// Usage: client HOST:PORT [CA.pem]
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	pb "headrace/tests/clients/go/inference"
)

const concurrentCalls = 1000
const streamMessages = 100
const largeElements = 2 << 20

func check(err error, what string) {
	if err != nil {
		fmt.Printf("fault in %s: %v\n", what, err)
		os.Exit(1)
	}
}

func require(condition bool, what string, got any) {
	if !condition {
		check(fmt.Errorf("got %v", got), what)
	}
}

func encode(values any) []byte {
	var buffer bytes.Buffer
	check(binary.Write(&buffer, binary.LittleEndian, values), "encode")
	return buffer.Bytes()
}

func floats(content []byte) []float32 {
	values := make([]float32, len(content)/4)
	check(binary.Read(bytes.NewReader(content), binary.LittleEndian, values), "decode")
	return values
}

func input(name, datatype string, shape ...int64) *pb.ModelInferRequest_InferInputTensor {
	return &pb.ModelInferRequest_InferInputTensor{Name: name, Datatype: datatype, Shape: shape}
}

// A request of sum_difference: SUM = A + B, DIFFERENCE = A - B.
func request(id string, a int32, b float32, typed bool) *pb.ModelInferRequest {
	as, bs := []int32{a, 1, 2, 3}, []float32{b, 0.5, -2, 1e6}
	request := &pb.ModelInferRequest{ModelName: "sum_difference", Id: id,
		Inputs: []*pb.ModelInferRequest_InferInputTensor{input("A", "INT32", 1, 4), input("B", "FP32", 1, 4)}}
	if typed {
		request.Inputs[0].Contents = &pb.InferTensorContents{IntContents: as}
		request.Inputs[1].Contents = &pb.InferTensorContents{Fp32Contents: bs}
	} else {
		request.RawInputContents = [][]byte{encode(as), encode(bs)}
	}
	return request
}

func verify(response *pb.ModelInferResponse, id string, a int32, b float32) {
	require(response.Id == id && len(response.Outputs) == 2, "response "+id, response)
	expected := map[string][]float32{
		"SUM":        {float32(a) + b, 1.5, 0, 1000003},
		"DIFFERENCE": {float32(a) - b, 0.5, 4, -999997},
	}
	for index, output := range response.Outputs {
		got := floats(response.RawOutputContents[index])
		require(output.Datatype == "FP32" && len(got) == 4, output.Name, output)
		for position, value := range expected[output.Name] {
			require(got[position] == value, output.Name, got)
		}
	}
}

func patient() *pb.ModelInferRequest {
	return &pb.ModelInferRequest{ModelName: "patient", RawInputContents: [][]byte{encode(make([]float32, 16))},
		Inputs: []*pb.ModelInferRequest_InferInputTensor{input("X", "FP32", 1, 16)}}
}

func connect(options []grpc.DialOption) *grpc.ClientConn {
	connection, err := grpc.NewClient(os.Args[1], options...)
	check(err, "connect")
	return connection
}

func unary(ctx context.Context, client pb.GRPCInferenceServiceClient) {
	live, err := client.ServerLive(ctx, &pb.ServerLiveRequest{})
	check(err, "live")
	require(live.Live, "live", live)
	fmt.Println("ok live")

	metadata, err := client.ModelMetadata(ctx, &pb.ModelMetadataRequest{Name: "sum_difference"})
	check(err, "metadata")
	require(metadata.Name == "sum_difference" && len(metadata.Inputs) == 2 && len(metadata.Outputs) == 2, "metadata", metadata)
	require(metadata.Inputs[0].Datatype == "INT32" && metadata.Inputs[0].Shape[1] == 4, "metadata", metadata)
	fmt.Println("ok metadata")

	for _, name := range []string{"raw", "typed"} {
		response, err := client.ModelInfer(ctx, request(name, 7, 2.25, name == "typed"))
		check(err, name)
		verify(response, name, 7, 2.25)
		fmt.Println("ok", name)
	}

	response, err := client.ModelInfer(ctx, request("gzip", 8, 4, false), grpc.UseCompressor(gzip.Name))
	check(err, "gzip")
	verify(response, "gzip", 8, 4)
	fmt.Println("ok gzip")
}

func concurrent(ctx context.Context, client pb.GRPCInferenceServiceClient) {
	var group sync.WaitGroup
	for number := range concurrentCalls {
		group.Go(func() {
			id := fmt.Sprint(number)
			response, err := client.ModelInfer(ctx, request(id, int32(number), 0.5, number%2 == 0))
			check(err, "concurrent")
			verify(response, id, int32(number), 0.5)
		})
	}
	group.Wait()
	fmt.Println("ok concurrent")
}

func stream(ctx context.Context, client pb.GRPCInferenceServiceClient) {
	call, err := client.ModelStreamInfer(ctx)
	check(err, "stream")
	for number := range streamMessages {
		check(call.Send(request(fmt.Sprint(number), int32(number), 0.25, false)), "stream")
	}
	check(call.CloseSend(), "stream")
	for number := range streamMessages {
		message, err := call.Recv()
		check(err, "stream")
		require(message.ErrorMessage == "", "stream", message.ErrorMessage)
		verify(message.InferResponse, fmt.Sprint(number), int32(number), 0.25)
	}
	_, err = call.Recv()
	require(err == io.EOF, "stream", err)
	fmt.Println("ok stream")
}

func failures(ctx context.Context, client pb.GRPCInferenceServiceClient) {
	limited, stop := context.WithTimeout(ctx, 200*time.Millisecond)
	_, err := client.ModelInfer(limited, patient())
	stop()
	require(status.Code(err) == codes.DeadlineExceeded, "deadline", err)
	fmt.Println("ok deadline")

	cancelled, cancel := context.WithCancel(ctx)
	time.AfterFunc(100*time.Millisecond, cancel)
	_, err = client.ModelInfer(cancelled, patient())
	require(status.Code(err) == codes.Canceled, "cancel", err)
	response, err := client.ModelInfer(ctx, request("after", 1, 1, false))
	check(err, "after cancel")
	verify(response, "after", 1, 1)
	fmt.Println("ok cancel")

	_, err = client.ModelInfer(ctx, &pb.ModelInferRequest{ModelName: "absent"})
	failure := status.Convert(err)
	require(failure.Code() == codes.NotFound && strings.Contains(failure.Message(), "'absent'"), "not_found", err)
	fmt.Println("ok not_found")

	// The quota is one request in an hour.
	excess := patient()
	excess.ModelName = "limited"
	client.ModelInfer(ctx, excess)
	_, err = client.ModelInfer(ctx, excess)
	failure = status.Convert(err)
	require(failure.Code() == codes.ResourceExhausted && len(failure.Details()) == 2, "details", err)
	retry, isRetry := failure.Details()[0].(*errdetails.RetryInfo)
	require(isRetry && retry.RetryDelay.AsDuration() > time.Minute, "details", failure.Details())
	fmt.Println("ok details")
}

func large(ctx context.Context, client pb.GRPCInferenceServiceClient) {
	values := make([]float32, largeElements)
	for index := range values {
		values[index] = float32(index)
	}
	content := encode(values)
	response, err := client.ModelInfer(ctx, &pb.ModelInferRequest{ModelName: "identity",
		Inputs:           []*pb.ModelInferRequest_InferInputTensor{input("X", "FP32", 1, largeElements)},
		RawInputContents: [][]byte{content}}, grpc.MaxCallRecvMsgSize(16<<20))
	check(err, "large")
	require(bytes.Equal(response.RawOutputContents[0], content), "large", "other bytes")
	fmt.Println("ok large")
}

// Calls on a connection that is silent, but for pings, for longer than their interval and timeout together.
func pings(ctx context.Context, options []grpc.DialOption, done chan<- bool) {
	parameters := keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 4 * time.Second, PermitWithoutStream: true}
	connection := connect(append(options, grpc.WithKeepaliveParams(parameters)))
	defer connection.Close()
	client := pb.NewGRPCInferenceServiceClient(connection)
	_, err := client.ServerLive(ctx, &pb.ServerLiveRequest{})
	check(err, "keepalive")
	limited, stop := context.WithTimeout(ctx, 15*time.Second)
	defer stop()
	require(!connection.WaitForStateChange(limited, connectivity.Ready), "keepalive", connection.GetState())
	_, err = client.ServerLive(ctx, &pb.ServerLiveRequest{})
	check(err, "keepalive")
	done <- true
}

func main() {
	security := insecure.NewCredentials()
	if len(os.Args) > 2 {
		var err error
		security, err = credentials.NewClientTLSFromFile(os.Args[2], "")
		check(err, "CA")
	}
	options := []grpc.DialOption{grpc.WithTransportCredentials(security)}
	ctx, stop := context.WithTimeout(context.Background(), time.Minute)
	defer stop()
	done := make(chan bool)
	go pings(ctx, options, done)
	connection := connect(options)
	defer connection.Close()
	client := pb.NewGRPCInferenceServiceClient(connection)
	unary(ctx, client)
	concurrent(ctx, client)
	stream(ctx, client)
	failures(ctx, client)
	large(ctx, client)
	<-done
	fmt.Println("ok keepalive")
}
