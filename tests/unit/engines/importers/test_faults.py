"""Errors of the exporters in plain words; the texts are those of PyTorch 2.15, Keras 3.15, TensorFlow 2.21 and tf2onnx 1.17."""

from __future__ import annotations

import pytest
from headrace_engines.importers.faults import explain


@pytest.mark.parametrize(
    ("program", "chain", "words"),
    [
        (
            "torch_program",
            [
                ["ConversionError", "Failed to convert the exported program to an ONNX model. Step 3/3"],
                [
                    "DispatchError",
                    "No ONNX function found for <OpOverload(op='aten.linalg_eig', overload='default')>. Failure",
                ],
            ],
            ("the exporter has no ONNX form of the operator aten.linalg_eig", "with other operators"),
        ),
        (
            "torch_program",
            [
                [
                    "GuardOnDataDependentSymNode",
                    "Could not guard on data-dependent expression Eq(u0, 1) (unhinted: Eq(u0, 1)).  (Size-like symbols: none)",
                ]
            ],
            ("control flow depends on the values of a tensor (Eq(u0, 1)", "torch.where"),
        ),
        (
            "torch_program",
            [
                [
                    "ConstraintViolationError",
                    "Constraints violated (batch)! For more information, run with TORCH_LOGS. - You marked batch as dynamic but "
                    "your code specialized it to be a constant (2).",
                ]
            ],
            ("the model fixes the size of the batch", "--static-batch"),
        ),
        (
            "torch_program",
            [
                [
                    "UserError",
                    "Constraints violated (S)! - Not all values of S = L['tensors'][0].size()[1] satisfy the guard",
                ]
            ],
            ("does not take every size of its free dimensions (S)", "--input-shape"),
        ),
        (
            "keras_program",
            [["ValueError", "Requested the deserialization of a `Lambda` layer whose `function` is a Python lambda."]],
            ("the file has a Lambda layer", "--allow-code"),
        ),
        (
            "keras_program",
            [["TypeError", "Could not locate class 'Scale'. Make sure custom classes are decorated"]],
            ("the class Scale, which is not in its file", "--custom-objects FILE.py"),
        ),
        (
            "savedmodel_program",
            [["FileNotFoundError", "Op type not registered 'SentencepieceOp' in binary running on host."]],
            ("no ONNX form of the operator SentencepieceOp", "other operators"),
        ),
        (
            "savedmodel_program",
            [["ValueError", "make_sure failure: Opset 40 is not supported by this version"]],
            ("the exporter does not write opset 40", "--opset"),
        ),
        (
            "torch_program",
            [["ModuleNotFoundError", "No module named 'timm'"]],
            ("needs the module timm", "--requirement timm"),
        ),
        ("keras_program", [["MemoryError", ""]], ("not enough memory", "close other programs")),
        # Not a rule of this program.
        (
            "keras_program",
            [["RuntimeError", "Constraints violated (S)!"]],
            ("RuntimeError: Constraints violated (S)!",),
        ),
        ("torch_program", [["ValueError", "line one\n\n  line two"]], ("ValueError: line one line two: ",)),
    ],
)
def test_a_known_error_names_the_part_and_the_cure(
    program: str, chain: list[list[str]], words: tuple[str, ...]
) -> None:
    text = explain(program, {"chain": chain})
    assert all(word in text for word in words), text


def test_the_innermost_error_counts() -> None:
    outer = ["ConversionError", "No ONNX function found for <OpOverload(op='aten.outer')>"]
    inner = ["DispatchError", "No ONNX function found for <OpOverload(op='aten.inner')>"]
    assert "aten.inner" in explain("torch_program", {"chain": [outer, inner]})


def test_an_error_with_a_remedy_is_kept() -> None:
    assert explain("torch_program", {"message": "it is blue", "cure": "paint it"}) == "it is blue: paint it"
