"""One command that measures Headrace beside its peers: `python -m loadtest.bench`.

spread      medians, ranges and ratios of rounds (pure)
wrk         the load client: script, run, parse
inprocess   ONNX Runtime without a server: the oracle of right answers, and the limit of throughput
session     what the cases share: model repository, cores, progress, interleaved rounds
cases       what is measured and which figure is to be reached
machine     where it was measured
report      tables for the terminal, Markdown and JSON
"""
