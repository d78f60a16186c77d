"""Digests of what an artefact is made from: the ONNX file with its tensors, and the configuration."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from headrace.config.document import refuse
from headrace.config.onnx_signature import external_files
from headrace.core.model_config import ModelConfig
from headrace.core.optimization_config import (
    HEADRACE_OPTIMIZATION_FIELDS,
    PRECISIONS,
    Optimization,
    asked_precision,
    tensorrt_accelerator,
)


def onnx_digest(path: Path) -> str:
    """SHA-256, in hex, of a file and, if it is an ONNX file, of all files that hold tensors of it.

    Raises:
        ConfigError: a file cannot be read, or holds tensors where it must not.
    """
    shown = shown_file(path)
    digest, may_name_files = _digest_of(path, shown)
    if path.suffix == ".onnx" and may_name_files:
        for place in external_files(path, shown):
            content, _ = _digest_of(path.parent / place, shown)
            digest.update(f"{place}\0{content.hexdigest()}\0".encode())
    return digest.hexdigest()


def config_digest(config: ModelConfig) -> str:
    """SHA-256, in hex, of what of a configuration makes an artefact what it is.

    That is what `optimization` says of engines, accelerators included, `max_batch_size`, the inputs as the model takes them, and
    `preprocess`, by which pictures become calibration samples, whoever does it in service. What is
    left at its default does not count.

    Args:
        config: complete.
    """
    told = config.model_dump(
        mode="json",
        exclude_defaults=True,
        include={
            "max_batch_size": True,
            "preprocess": True,
            "optimization": {*HEADRACE_OPTIMIZATION_FIELDS, "execution_accelerators"},
        },
        exclude={"preprocess": {"by", "source"}},
    )
    told["input"] = [
        tensor.model_dump(mode="json", include={"name", "data_type", "dims", "reshape"}) for tensor in config.input
    ]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def fits_config(stored_digest: str, asked: str, config: ModelConfig) -> bool:
    """True if an artefact was built for a configuration, or for what the configuration says now.

    `headrace build --precision int8` stores the digest of the configuration as it was. If `precision: int8` is written into the
    file afterwards, the same artefact fits: only the precision may differ, and it must be the one that was built.

    Args:
        stored_digest: `config_digest` of the configuration at the time of the build.
        asked: the precision that was asked for then, by the configuration or the command line.
        config: complete.
    """
    if stored_digest == config_digest(config):
        return True
    if asked != asked_precision(config.optimization):
        return False
    variants = _with_other_precisions(config.optimization)
    return any(stored_digest == config_digest(config.model_copy(update={"optimization": one})) for one in variants)


def _with_other_precisions(told: Optimization) -> list[Optimization]:
    """The same optimisation with every other way to say a precision, or none."""
    variants = [told.model_copy(update={"precision": word}) for word in (None, *PRECISIONS)]
    accelerator = tensorrt_accelerator(told)
    # Triton's accelerator may have been added for its precision alone.
    if accelerator is not None and not set(accelerator.parameters) - {"precision_mode"}:
        variants += [one.model_copy(update={"execution_accelerators": None}) for one in variants]
    return variants


def shown_file(path: Path) -> str:
    """How a finding names a file of a version: <model>/<version>/<file>, as it lies in a repository."""
    return "/".join(path.parts[-3:])


def _digest_of(path: Path, shown: str) -> tuple[hashlib._Hash, bool]:
    """The digest, and False where the content names no other file for sure."""
    digest = hashlib.sha256()
    named, tail = False, b""
    try:
        with path.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
                # The key under which protobuf stores where a tensor's data are; far cheaper than reading the message.
                named = named or b"location" in tail + block
                tail = block[-8:]
    except OSError as error:
        raise refuse(shown, None, f"cannot be read: {error.strerror}", "check the file and its permissions") from error
    return digest, named
