"""One command that measures Headrace beside its peers: `python -m loadtest.bench`.

spread      medians, ranges and ratios of rounds (pure)
wrk         the load client for HTTP: script, run, parse
h2load      the load client for unary gRPC: run, parse
streaming   the load client for streams
grpc_calls  gRPC servers under load, their own counts held against the client's
inprocess   ONNX Runtime without a server: the oracle of right answers, and the limit of throughput
session     what the cases share: model repository, cores, progress, interleaved rounds
cases       what is measured and which figure is to be reached
machine     where it was measured
report      tables for the terminal, Markdown and JSON
"""
