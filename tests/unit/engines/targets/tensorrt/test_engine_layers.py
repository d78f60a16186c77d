"""Layers from the engine inspector's JSON, and nodes from TensorRT's messages."""

from __future__ import annotations

import json

import pytest
from headrace_engines.errors import BuildError
from headrace_engines.targets.tensorrt.api import ParserFault, explain_parser, mentioned_nodes
from headrace_engines.targets.tensorrt.engine_layers import LayerTimer, read_layers


def tensor(kind: str) -> dict[str, object]:
    return {"Name": "t", "Location": "Device", "Dimensions": [1, 3], "Format/Datatype": kind}


def entry(name: str, kinds: list[str], metadata: str, **more: object) -> dict[str, object]:
    return {
        "Name": name,
        "LayerType": "CaskConvolution",
        "Inputs": [tensor(k) for k in kinds],
        "Metadata": metadata,
    } | more


def test_fused_nodes_are_read_from_the_metadata() -> None:
    # As TensorRT 10 writes it: records joined by control characters, which strict JSON does not allow raw.
    text = json.dumps({"Layers": [entry("a + b", ["Half"], "[ONNX Layer: a]|[ONNX Layer: b[0]]|[ONNX Layer: w]")]})
    for mark in ("\x1e", "\x1f", " "):
        (layer,) = read_layers(text.replace("|", mark), {"a + b": 5.0}, ["a", "b[0]", "c"])
        assert layer.nodes == ("a", "b[0]")
        assert (layer.time_us, layer.share) == (5.0, 1.0)
    (layer,) = read_layers(text.replace("|", "\x1e"), {}, None)
    assert layer.nodes == ("a", "b[0]", "w")
    assert (layer.time_us, layer.share) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("kinds", "precision"),
    [
        (["Half"], "fp16"),
        (["Float"], "fp32"),
        (["Row major linear FP32"], "fp32"),
        (["Channel major INT8 format where channel % 32 == 0", "Half"], "int8"),
        (["BFloat16"], "bf16"),
        (["FP8"], "fp8"),
        (["Int64", "Float"], "fp32"),
        (["Bool", "Half"], "fp16"),
        (["Int32"], "int32"),
        (["UInt8"], "uint8"),
        (["something new"], ""),
        ([], ""),
    ],
)
def test_the_precision_is_that_of_the_narrowest_input(kinds: list[str], precision: str) -> None:
    (layer,) = read_layers(json.dumps({"Layers": [entry("a", kinds, "")]}), {}, None)
    assert layer.precision == precision


def test_layers_without_details_are_classified_by_name() -> None:
    text = json.dumps({"Layers": ["a + b", "Reformatting CopyNode for Input Tensor 0 to a"]})
    first, second, third = read_layers(text, {"a + b": 3.0, "hidden": 1.0}, ["a", "b"])
    assert first.nodes == ("a", "b")
    assert first.share == 0.75
    assert second.nodes == ()
    assert (third.name, third.time_us, third.share) == ("hidden", 1.0, 0.25)


@pytest.mark.parametrize("text", ["", "{}", "[]", "no json"])
def test_an_unreadable_description_is_reported(text: str) -> None:
    with pytest.raises(BuildError, match="inspector cannot be read"):
        read_layers(text, {}, None)


def test_times_are_means_of_executions() -> None:
    times = LayerTimer()
    for ms in (1.0, 3.0):
        times.add("a", ms)
        times.add("looped", ms)
        times.add("looped", ms)
    assert times.mean_us(2) == {"a": 2000.0, "looped": 4000.0}


def test_whole_names_are_matched() -> None:
    names = ["/conv", "/conv/a", "conv", "a.b", "a"]
    assert mentioned_nodes("PWN(/conv/a + conv, a.b).", names) == ["/conv/a", "conv", "a.b"]
    assert mentioned_nodes("{ForeignNode[/conv...a]}", names) == ["/conv", "a"]


def test_many_unsupported_nodes_are_shortened() -> None:
    faults = [ParserFault(f"n{i}", "Odd" if i < 8 else "Odder", "", True) for i in range(11)]
    text = explain_parser(faults, "10.6.0")
    assert text.startswith("11 nodes are not supported by TensorRT 10.6.0")
    assert text.endswith("and 3 more (Odder)")
