"""A GPU that is not there, and a TensorRT that runs on it."""

from tests.support.fake_gpu import cuda as cuda
from tests.support.fake_gpu import trt as trt
from tests.support.fake_gpu import trt_version as trt_version
