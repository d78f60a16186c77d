"""Programs that run in the interpreter of a framework: the standard library, NumPy and the framework; Python 3.9 and later.

Each module but `exchange` has `open_source(request, report)`, which returns a `Source` (`exchange`).
"""
