"""The parts: each file has `run(setup, reporter)`, which `part_process` calls in a process of its own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the run.

    Attributes:
        letter: as `--only` takes it, and as the issue counts it.
        module: of this package.
        title: what is measured, in a line.
        limit_s: how long it may take, for one precision.
        usual_s: how long it takes on an H200: kept for it while the parts before it run.
        usual_int8_s: the same for INT8, where less is measured.
        least_s: with less time left it is not begun.
    """

    letter: str
    module: str
    title: str
    limit_s: float
    usual_s: float
    usual_int8_s: float = 0.0
    least_s: float = 15.0

    def usual(self, precision: str) -> float:
        """For one precision, in seconds."""
        return (precision == "int8" and self.usual_int8_s) or self.usual_s


PREPARE = Part("prepare", "prepare", "the model and its engine", 300.0, 90.0, least_s=5.0)
PARTS = (
    Part("a", "raw_engine", "the engine alone: CUDA graph replay, inputs on the device", 45.0, 12.0, least_s=10.0),
    Part("b", "in_process", "`ModelHandle` in process, uint8 pictures, closed loop", 90.0, 20.0),
    Part("d", "lone", "one caller at a time, one picture", 75.0, 33.0),
    Part("c", "over_wire", "client processes on the same host, 8 uint8 pictures a request", 140.0, 48.0, 30.0),
    Part("f", "sweep", "random arrivals at a share of the capacity, 8 uint8 pictures a request", 90.0, 35.0),
    Part("e", "instances", "instances and CUDA graphs", 120.0, 45.0),
)
TWO_GPUS = Part("two-gpus", "two_gpus", "two GPUs against one", 150.0, 60.0)
