"""Compares the tensors of two models: another model gets a share of the traffic only if they are equal."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.core.tensor import ModelSpec, TensorSpec
from headrace.inference.scheduling.version_handle import VersionHandle


def contract_problem(stable: VersionHandle, other: VersionHandle) -> str:
    """Return why `other` cannot answer the requests of `stable`; "" if it can.

    Args:
        stable: version that the requests are for.
        other: version of another model.
    """
    if other.policy.sequences is not None:
        return "it has sequence_batching: the requests of a sequence belong to one version"
    if stable.spec.decoupled != other.spec.decoupled:
        return "one of the models is decoupled, the other one is not"
    return (
        _tensor_problem("input", stable.spec.inputs, other.spec.inputs)
        or _tensor_problem("output", stable.spec.outputs, other.spec.outputs)
        or _size_problem(stable.spec, other.spec)
    )


def _tensor_problem(kind: str, expected: Mapping[str, TensorSpec], actual: Mapping[str, TensorSpec]) -> str:
    """Return the first difference of the tensors; labels of classes may differ, and the order."""
    if expected.keys() != actual.keys():
        names = [", ".join(sorted(each)) or "none" for each in (actual, expected)]
        return f"its {kind}s are {names[0]}, those of the stable version are {names[1]}"
    for name, spec in expected.items():
        other = actual[name]
        for field, ours, theirs in (
            ("datatype", spec.datatype.name, other.datatype.name),
            ("shape", list(spec.shape), list(other.shape)),
            ("optional", spec.optional, other.optional),
        ):
            if ours != theirs:
                return f"{field} of its {kind} {name} is {theirs}, that of the stable version is {ours}"
    return ""


def _size_problem(stable: ModelSpec, other: ModelSpec) -> str:
    """Return which size `stable` accepts and `other` does not."""
    ours, theirs = stable.max_batch_size, other.max_batch_size
    if theirs < ours or bool(theirs) != bool(ours):
        return f"its max_batch_size is {theirs}, that of the stable version is {ours}"
    # Two of the same dimensions may be bounded by `pad`.
    longest = [0 if spec.padded is None else spec.padded.longest for spec in (stable, other)]
    if longest[1] and (not longest[0] or longest[1] < longest[0]):
        return f"the largest length of its padded inputs is {longest[1]}, that of the stable version is {longest[0] or 'any'}"
    return ""
