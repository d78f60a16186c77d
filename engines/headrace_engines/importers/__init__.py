"""Models of other frameworks as ONNX models of the repository, compared with the framework that they come from."""
