"""Digests of what an artefact is made from: the ONNX file with its tensors, and the configuration."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from server.config.document import refuse
from server.config.onnx_signature import external_files
from server.core.model_config import ModelConfig
from server.core.optimization_config import HEADRACE_OPTIMIZATION_FIELDS


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
