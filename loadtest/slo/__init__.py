"""Value of latency objectives: `python -m loadtest.slo`.

subject     the device, the policies, and both ways to replay a trace: by the clock and in virtual time
overload    goodput at 1.5 and 2 times the capacity, against a batcher of fixed size and delay
objectives  three objectives without retuning, against the best fixed setting that a sweep finds
tenants     two clients, one of them flooding
simulator   the simulator against a real run of the same trace
deep_queue  CPU time of admission and decision while 10,000 requests wait
over_http   the overload once more: a real server, ONNX Runtime, real sockets
convolution the same for a net that shares its core with the front end, for objectives of 2 to 10 batches and without one
curves      goodput and latency over the load, drawn from the simulator
"""
