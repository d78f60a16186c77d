"""Digests that a build depends on: of an ONNX file and of a configuration."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from headrace.config.documents import open_regular_file, refuse
from headrace.config.model_config import ModelConfig
from headrace.config.onnx_model import external_files
from headrace.config.optimization_config import (
    HEADRACE_OPTIMIZATION_FIELDS,
    PRECISIONS,
    Optimization,
    requested_precision,
    tensorrt_accelerator,
)


def onnx_digest(path: Path) -> str:
    """Return the SHA-256, in hex, of a file and, if it is an ONNX file, of all files with its external tensors.

    Raises:
        ConfigError: a file cannot be read, or external tensors are outside of the folder.
    """
    name = display_path(path)
    digest, may_name_files = _digest_of(path, name)
    if path.suffix == ".onnx" and may_name_files:
        for location in external_files(path, name):
            content, _ = _digest_of(path.parent / location, name)
            digest.update(f"{location}\0{content.hexdigest()}\0".encode())
    return digest.hexdigest()


def config_digest(config: ModelConfig) -> str:
    """Return the SHA-256, in hex, of the configuration fields that decide the content of an artefact.

    These are `optimization` as far as it concerns engines, accelerators included; `max_batch_size`; the inputs as in the
    model; and `preprocess`, which turns images into calibration samples. Fields at their defaults do not count.

    Args:
        config: complete configuration.
    """
    document = config.model_dump(
        mode="json",
        exclude_defaults=True,
        include={
            "max_batch_size": True,
            "preprocess": True,
            "optimization": {*HEADRACE_OPTIMIZATION_FIELDS, "execution_accelerators"},
        },
        exclude={"preprocess": {"by", "source"}},
    )
    document["input"] = [
        tensor.model_dump(mode="json", include={"name", "data_type", "dims", "reshape"}) for tensor in config.input
    ]
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def fits_config(stored_digest: str, requested: str, config: ModelConfig) -> bool:
    """True if an artefact was built for a configuration, or for its present precision.

    `headrace build --precision int8` stores the digest of the configuration at the time of the build. If `precision: int8` is
    written into the file afterwards, the same artefact fits: only the precision may differ, and it must be the one that was
    built.

    Args:
        stored_digest: `config_digest` of the configuration at the time of the build.
        requested: precision requested then, by the configuration or the command line.
        config: complete configuration.
    """
    if stored_digest == config_digest(config):
        return True
    if requested != requested_precision(config.optimization):
        return False
    variants = _with_other_precisions(config.optimization)
    return any(stored_digest == config_digest(config.model_copy(update={"optimization": one})) for one in variants)


def _with_other_precisions(optimization: Optimization) -> list[Optimization]:
    """Return the optimisation with every other way to write a precision, or none."""
    variants = [optimization.model_copy(update={"precision": word}) for word in (None, *PRECISIONS)]
    accelerator = tensorrt_accelerator(optimization)
    # Triton's accelerator may have been added for its precision alone.
    if accelerator is not None and not set(accelerator.parameters) - {"precision_mode"}:
        variants += [one.model_copy(update={"execution_accelerators": None}) for one in variants]
    return variants


def display_path(path: Path) -> str:
    """Return the name of a version's file in findings: <model>/<version>/<file>."""
    return "/".join(path.parts[-3:])


def _digest_of(path: Path, name: str) -> tuple[hashlib._Hash, bool]:
    """Return the digest, and False if the content certainly names no other file."""
    digest = hashlib.sha256()
    has_location, tail = False, b""
    try:
        with open_regular_file(path) as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
                # The key under which protobuf stores the file of an external tensor; far cheaper than parsing the message.
                has_location = has_location or b"location" in tail + block
                tail = block[-8:]
    except OSError as error:
        raise refuse(name, None, f"cannot be read: {error.strerror}", "check the file and its permissions") from error
    return digest, has_location
