"""The bench of a machine with NVIDIA GPUs: how much of an engine is left once a server stands before it.

    python -m loadtest.gpu --output DIR                 every part; results.json, report.md, log.txt in DIR
    python -m loadtest.gpu --backend onnxruntime ...    the same code on a CPU and a model so small that its figures mean nothing

`__main__` plans and writes; every part runs in a process of its own (`part_process`, watched by `watch`), so that one that
crashes, hangs or leaves a GPU unusable is a line in the report and not the end of the run. Parts report figure by figure
(`messages`), and every figure is printed and in the files as soon as it is there.
"""
