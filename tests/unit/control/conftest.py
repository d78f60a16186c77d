"""A GPU that is not there, and a TensorRT that runs on it."""

from tests.fake_gpu import cuda as cuda
from tests.fake_gpu import trt as trt
from tests.fake_gpu import trt_version as trt_version
