"""A builder for tests, in place of `python -m headrace_engines build`: publishes a prepared engine.

python tests/support/fake_builder.py ORDERS MODEL_FOLDER --version N --target T

ORDERS is a folder: `engine.onnx` is published; for TensorRT `engine.plan`, with the stamp's fields in `tensorrt.json`.
`calls` gets a line for each start and each SIGTERM. While `hold` is there it waits; while `progress` is there too, which it has
printed before. `fail` holds what it says before it fails, `slower` what it says of an engine that it does not publish; with
`deaf` it does not heed SIGTERM; with `readonly` it takes the folder for one that cannot be written.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).resolve()


def command(orders: Path) -> tuple[str, ...]:
    """The command line of the builder, as the server takes it."""
    orders.mkdir(parents=True, exist_ok=True)
    return (sys.executable, str(SCRIPT), str(orders))


def publish(
    folder: Path, version: int, engine: bytes, suffix: str = ".onnx", target: Path | None = None, **fields: object
) -> Path:
    """Put an engine beside a model as builders do: the file, then its stamp, each whole at once; the engine's path.

    Args:
        folder: the model's, directly in the repository.
        version: its number.
        engine: the file's content.
        suffix: of its name.
        target: folder that is used instead of the version's folder.
        fields: fields of the stamp with other values.
    """
    from dataclasses import asdict

    from headrace.config.digests import config_digest, onnx_digest
    from headrace.config.files import write_durably
    from headrace.config.machine import onnxruntime_machine
    from headrace.config.manifest import Stamp, artefact_name, write_stamp
    from headrace.config.model_folder import read_model_folder

    model = read_model_folder(folder, folder.parent)
    key = hashlib.sha256(engine + folder.name.encode()).hexdigest()
    target = target or folder / str(version)
    path = target / artefact_name(key, suffix)
    write_durably(path, engine)
    stamp = {
        "key": key,
        "artefact": path.name,
        "artefact_sha256": onnx_digest(path),
        "size_bytes": len(engine),
        "onnx_sha256": onnx_digest(model.source_file(version)),
        "config_digest": config_digest(model.config),
        "spec_digest": "0" * 64,
        "precision": "int8",
        "asked": "int8",
        "overridden": False,
        "machine": asdict(onnxruntime_machine()),
        "accuracy": {"top1_agreement": 0.9875, "cosine": 0.999, "max_abs": 0.1, "accuracy": None},
    }
    write_stamp(target, Stamp.from_json({**stamp, **fields}))
    return path


def main() -> int:
    """One build."""
    parser = argparse.ArgumentParser()
    parser.add_argument("orders", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--version", type=int)
    parser.add_argument("--target")
    parser.add_argument("--state-dir", type=Path)
    options = parser.parse_args()
    orders = options.orders

    def note(word: str) -> None:
        with (orders / "calls").open("a") as calls:
            calls.write(f"{word} {options.folder.name} {options.version} {options.target} {os.nice(0)}\n")

    def stop(number: int, _frame: object) -> None:
        note("stopped")
        if not (orders / "deaf").exists():
            sys.exit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    note("started")
    while (orders / "hold").exists():
        time.sleep(0.01)
    if (orders / "fail").exists():
        # As a builder's table of built engines, which the server does not read.
        print("digits int8 refused")
        sys.stderr.write((orders / "fail").read_text())
        return 1
    if (orders / "slower").exists():
        sys.stderr.write((orders / "slower").read_text())
        return 3
    if (orders / "progress").exists():
        print((orders / "progress").read_text(), flush=True)
        while (orders / "progress").exists():
            time.sleep(0.01)
    target = options.folder / str(options.version)
    if not os.access(target, os.W_OK) or (orders / "readonly").exists():
        from headrace.config.serving_plan import engine_folder

        target = engine_folder(options.state_dir, options.folder, options.version)
        target.mkdir(parents=True, exist_ok=True)
    if options.target == "tensorrt":
        fields = json.loads((orders / "tensorrt.json").read_text())
        publish(options.folder, options.version, (orders / "engine.plan").read_bytes(), ".plan", target, **fields)
    else:
        publish(options.folder, options.version, (orders / "engine.onnx").read_bytes(), target=target)
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
