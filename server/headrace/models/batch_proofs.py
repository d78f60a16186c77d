"""Proves the batch sizes of a version at its load and while it is idle, and stores the verdict in the state folder.

<state>/proofs/<key>.json       {"format": 1, "model": ..., "starts": 1, "verdict": {...}}

The key is the digest of all that decides the outputs of a batch: file, runtime, device, driver and configuration. A model whose
graph is known to keep rows apart (`headrace.config.row_rules`) and runs on ONNX Runtime is not tested.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from headrace_model.protocol import ProtocolError, pack_texts, unpack_texts

from headrace.config.auto_complete import keeps_rows_apart
from headrace.config.documents import open_regular_file
from headrace.config.files import remove_oldest, write_durably
from headrace.config.model_config import ModelConfig
from headrace.config.model_folder import ModelFolder
from headrace.config.onnx_model import read_signature
from headrace.config.ragged_rules import is_ragged
from headrace.config.serving_plan import PYTHON_RUNTIMES, ServingPlan
from headrace.core.clock import NS_PER_MS, NS_PER_S, Clock, monotonic_ns
from headrace.core.errors import HeadraceError
from headrace.core.tensor import Array
from headrace.inference.scheduling.batch_proof import (
    BatchVerdict,
    ProofError,
    ProofInterrupted,
)
from headrace.inference.scheduling.joining import RaggedLayout
from headrace.inference.scheduling.proven_sizes import ProvenSizes
from headrace.inference.scheduling.row_sampler import MAX_SAMPLES, RowSample, RowSampler
from headrace.models.accounted_model import AccountedModel
from headrace.models.proof_run import NOT_TESTED, ProofRun, untestable
from headrace.models.warmup import CONFIG_FIELDS, machine_of
from headrace.runtimes.base import Execution

logger = logging.getLogger("headrace.proof")

_FORMAT = 1
_CONFIG_FIELDS = {*CONFIG_FIELDS, "dynamic_batching", "sequence_batching"}
_MAX_BYTES = 1 << 16
_MAX_RECORDS = 50_000
# A proof that has ended its process so often is not started again.
_MAX_STARTS = 2
# Time of the proof at a load; sizes that are left are proven while the model is idle.
_LIMIT_S = 2.0
# No limit: a request ends a proof of an idle model.
_IDLE_LIMIT_S = 1e6
# Models with a stored difference.
_MAX_CASES = 64


@dataclass(slots=True)
class _Record:
    """Content of a file."""

    starts: int = 0  # proofs that have begun since the last one that ended
    verdict: BatchVerdict | None = None  # of the last proof
    is_complete: bool = False  # all sizes were tested


class BatchProofs:
    """Verdicts in a folder. Thread-safe: a record is replaced as a whole.

    Args:
        state: state folder; None stores nothing.
        limit_s: time limit of a proof at the first load, in seconds.
        later_s: the same at later loads, for the sizes that are left: a server proves them while the model is idle.
        clock: monotonic nanoseconds.
    """

    def __init__(
        self, state: Path | None, limit_s: float = _LIMIT_S, later_s: float = 0.0, clock: Clock = monotonic_ns
    ) -> None:
        self._folder = None if state is None else state.expanduser() / "proofs"
        self._limit_s, self._later_s, self._clock = limit_s, later_s, clock
        self._slots = threading.Semaphore(MAX_SAMPLES)
        self._records: dict[str, _Record] = {}  # of this process, so that an evicted model is not tested again

    def prove(
        self,
        folder: ModelFolder,
        version_number: int,
        plan: ServingPlan,
        digest: Callable[[], str],
        model: AccountedModel,
        layout: RaggedLayout | None = None,
    ) -> None:
        """Test the batches of a loaded version before its instances start; logs what is not proven.

        Args:
            folder: the model's folder.
            version_number: version number.
            plan: file and runtime.
            digest: returns the digest of the file.
            model: the loaded model; gets its verdict, and the function that tests the sizes that are left.
            layout: joins the rows of a batch of a ragged model; None for any other.
        """
        config = folder.config
        max_rows = model.max_rows
        if config.proof == "off" or max_rows < 2 or plan.runtime in PYTHON_RUNTIMES or not _merges(config, plan):
            return
        reason = untestable(config)
        if reason:
            model.verdict = BatchVerdict(reason=reason)
            return
        key = _key(config, plan, digest(), max_rows)
        self._records[key] = record = self._records.get(key) or self._read(key)
        open_proof = cache(lambda: ProofRun(folder, version_number, plan, model, layout, self._clock))
        if record.verdict is None and not _is_doubtful(folder, plan):
            self._records[key] = record = _Record(is_complete=True)
        elif record.verdict is None or (self._later_s and not record.is_complete):
            limit_s = self._limit_s if record.verdict is None else self._later_s
            record = self._prove(key, config, partial(open_proof().run, int(limit_s * NS_PER_S)))
        if config.proof_sample and config.sequence_batching is None:  # a row of a sequence depends on those before it
            model.sampler = RowSampler(config.proof_sample, self._slots)
        model.has_left = not record.is_complete
        model.prove = partial(self._prove_idle, key, plan, model, open_proof)
        if record.verdict is not None:
            _log(config, record.verdict)
        _serve(plan, model, record)

    def _prove_idle(
        self,
        key: str,
        plan: ServingPlan,
        model: AccountedModel,
        open_proof: Callable[[], ProofRun],
        execution: Execution,
        is_busy: Callable[[], bool],
    ) -> bool:
        """Test the sizes and the row that are left on an idle instance, and apply the verdict; see `AccountedModel.prove`."""
        before, proof = self._records[key].verdict, open_proof()
        inner = execution.inner if isinstance(execution, ProvenSizes) else execution
        if model.has_left:
            run = partial(proof.run_on, inner, int(_IDLE_LIMIT_S * NS_PER_S), is_busy=is_busy)
            record = self._prove(key, model.config, run)
            model.has_left = not record.is_complete
            if record.verdict is not None and record.verdict != before:
                verified = record.verdict.verified
                logger.info("model %s: batches of %s rows are proven since it was idle", model.config.name, verified)
        if model.sampler is not None and model.sampler.sample is not None:
            self._check_sample(key, model, model.sampler, proof, inner, is_busy)
        record = self._records[key]
        if record.verdict is not None and record.verdict != before:
            _log(model.config, record.verdict)
        return _serve(plan, model, record)

    def _check_sample(
        self,
        key: str,
        model: AccountedModel,
        sampler: RowSampler,
        proof: ProofRun,
        execution: Execution,
        is_busy: Callable[[], bool],
    ) -> None:
        """Run a row of a batch again alone; a difference is stored, and its batch size is not run any more."""
        record, sample = self._records[key], sampler.sample
        assert sample is not None
        try:
            verdict = proof.check_sample(execution, sample, record.verdict or NOT_TESTED, record.is_complete, is_busy)
        except ProofInterrupted:
            return
        except ProofError as error:  # without bounds no difference is one
            logger.info("model %s: no rows are run again: %s", model.config.name, error)
            model.sampler, verdict = None, None
        except HeadraceError as error:  # e.g. a row that is shorter than the engine supports without its padding
            logger.info("model %s: a row does not run alone: %s", model.config.name, error)
            verdict = None
        sampler.clear()
        if verdict is None:
            return
        model.row_differences += 1
        logger.error("model %s: a row of a batch of %d: %s", model.config.name, sample.size, verdict.reason)
        self._records[key] = record = _Record(record.starts, verdict, record.is_complete)
        self._write(key, model.config.name, record)
        self._store_case(model.config.name, sample)

    def _store_case(self, model: str, sample: RowSample) -> None:
        """Store the latest difference of a model for `headrace proof`; only the server's user may read it."""
        if self._folder is None:
            return
        arrays: dict[str, Array] = {}
        for name, values in sample.inputs.items():
            if values.dtype.hasobject:  # NumPy stores no text of any length
                arrays |= {f"shape.{name}": np.array(values.shape), f"text.{name}": _packed(values)}
            else:
                arrays[f"in.{name}"] = values
        content = io.BytesIO()
        np.savez(content, case=np.array([sample.size, sample.place]), **arrays)  # type: ignore[arg-type]
        folder = self._folder / "differences"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_durably(folder / f"{model}.npz", content.getbuffer(), 0o600)
            remove_oldest(folder, _MAX_CASES, ".npz")
        except OSError as error:
            logger.warning("%s cannot be written: %s", folder, error.strerror)

    def _prove(
        self, key: str, config: ModelConfig, run: Callable[[BatchVerdict | None], tuple[BatchVerdict, bool]]
    ) -> _Record:
        record = self._records[key]
        if record.starts >= _MAX_STARTS:
            reason = "the process has ended while the batch sizes were being proven"
            record = _Record(record.starts, BatchVerdict(alone=True, reason=reason), True)
        else:
            self._write(key, config.name, replace(record, starts=record.starts + 1))
            begun_ns = self._clock()
            verdict, is_complete = run(record.verdict)
            took_ms = (self._clock() - begun_ns) // NS_PER_MS
            logger.debug("model %s took %d ms to prove batches of %s rows", config.name, took_ms, verdict.verified)
            record = _Record(0, verdict, is_complete)
            self._write(key, config.name, record)
        self._records[key] = record
        return record

    def _read(self, key: str) -> _Record:
        if self._folder is None:
            return _Record()
        try:
            with open_regular_file(self._folder / f"{key}.json") as stream:
                document: Any = json.loads(stream.read(_MAX_BYTES))
            if document["format"] != _FORMAT:
                return _Record()
            stored = document["verdict"]
            verdict = (
                None
                if stored is None
                else BatchVerdict(
                    tuple(map(int, stored["verified"])),
                    {int(size): str(text) for size, text in stored["faults"].items()},
                    stored["alone"] is True,
                    tuple(map(int, stored["allowed"])),
                    str(stored["reason"]),
                )
            )
            return _Record(int(document["starts"]), verdict, document["is_complete"] is True)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return _Record()

    def _write(self, key: str, model: str, record: _Record) -> None:
        if self._folder is None:
            return
        document = {"format": _FORMAT, "model": model, **asdict(record)}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_durably(self._folder / f"{key}.json", json.dumps(document).encode())
            if key.startswith("00"):  # one write in 256
                remove_oldest(self._folder, _MAX_RECORDS)
        except OSError as error:
            cure = "name a writable folder with --state-dir"
            logger.warning("%s cannot be written: %s (%s)", self._folder, error.strerror, cure)


class StoredDifference(BatchProofs):
    """Repeats the stored difference of a model at its load, in place of a proof.

    Args:
        state: state folder.
        model: name of the model.

    Attributes:
        sample: the row that differed, with its batch; None without a stored difference.
        results: a text for each loaded version, and True if the outputs differ again.
    """

    def __init__(self, state: Path, model: str) -> None:
        super().__init__(state)
        self.sample: RowSample | None = None
        self.results: list[tuple[str, bool]] = []
        with suppress(OSError, ValueError, KeyError, EOFError, BadZipFile, ProtocolError):
            with np.load(state.expanduser() / "proofs" / "differences" / f"{model}.npz", allow_pickle=False) as stored:
                size, place = map(int, stored["case"])
                arrays, packed, shapes = (
                    {name.removeprefix(kind): stored[name] for name in stored if name.startswith(kind)}
                    for kind in ("in.", "text.", "shape.")
                )
            texts = {name: unpack_texts(values.tobytes(), shapes[name].tolist()) for name, values in packed.items()}
            self.sample = RowSample(size, place, arrays | texts, {})

    def prove(
        self,
        folder: ModelFolder,
        version_number: int,
        plan: ServingPlan,
        digest: Callable[[], str],
        model: AccountedModel,
        layout: RaggedLayout | None = None,
    ) -> None:
        """Run the stored batch, and its row alone, and compare them as the server does."""
        sample, execution = self.sample, model.execution(0)
        assert sample is not None, "the caller loads a model only for a stored difference"
        try:
            proof = ProofRun(folder, version_number, plan, model, layout, self._clock)
            again = replace(sample, outputs=proof.run_again(execution, sample, sample.size))
            verdict = proof.check_sample(execution, again, NOT_TESTED, True, lambda: False)
            equal = f"row {sample.place} of {sample.size} has the outputs of the row alone"
            text, differs = (equal, False) if verdict is None else (verdict.reason, True)
        except Exception as error:  # the inputs may be those of an earlier model of this name
            text, differs = f"the stored batch fails: {type(error).__name__}: {error}", True
        finally:
            execution.close()
        self.results.append((f"{folder.config.name}/{version_number}: {text}", differs))


def _packed(texts: Array) -> Array:
    return np.frombuffer(pack_texts(texts), np.uint8)


def _serve(plan: ServingPlan, model: AccountedModel, record: _Record) -> bool:
    """Let a model run batches as a record allows; return True if its executions must be opened again for that."""
    verdict, before = record.verdict or NOT_TESTED, model.verdict
    if model.config.proof == "warn":
        verdict = BatchVerdict(verdict.verified, verdict.faults, reason=verdict.reason)
    if model.config.sequence_batching is not None:
        verdict = replace(verdict, allowed=(1,) if verdict.alone else verdict.allowed)  # each row is a request
        if verdict.allowed:
            model.detach_states()  # in host memory they are cut with their rows
    elif verdict.alone and plan.runtime == "tensorrt" and not is_ragged(model.config) and not model.run_unpadded():
        verdict = replace(verdict, allowed=(1,))  # in a process, which pads its batches
    model.verdict = verdict
    return (before.alone, bool(before.allowed)) != (verdict.alone, bool(verdict.allowed))


def _merges(config: ModelConfig, plan: ServingPlan) -> bool:
    """Return True if requests share batches or are cut; engines pad their batches in any case."""
    is_cut = config.oversize == "split" or (config.cpu_max_batch_size or config.max_batch_size) < config.max_batch_size
    is_merged = config.dynamic_batching is not None or config.sequence_batching is not None
    return is_merged or is_cut or plan.runtime == "tensorrt"


def _is_doubtful(folder: ModelFolder, plan: ServingPlan) -> bool:
    """Return False for a graph that keeps rows apart, on ONNX Runtime."""
    if plan.runtime == "tensorrt":
        return True
    return not keeps_rows_apart(folder.config, read_signature(plan.file, plan.file.name))


def _key(config: ModelConfig, plan: ServingPlan, digest: str, max_rows: int) -> str:
    parts = {
        "format": _FORMAT,
        "headrace": version("headrace"),
        "digest": digest,
        "runtime": plan.runtime,
        "machine": str(machine_of(plan.runtime)),
        "max_rows": max_rows,
        "config": config.model_dump(mode="json", exclude_defaults=True, include=_CONFIG_FIELDS),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _log(config: ModelConfig, verdict: BatchVerdict) -> None:
    if verdict.state == "proven":
        return
    effect = {"alone": "each request runs alone and whole", "limited": f"batches run with {verdict.allowed} rows"}
    effect["partial"] = f"batches of {', '.join(map(str, verdict.verified))} rows are proven"
    text = effect.get(verdict.state, "batches are not proven, and run")
    if config.proof == "warn" and verdict.state not in ("partial", "untested"):
        text = "batches run in spite of it (proof: warn)"
    level = logging.INFO if verdict.state in ("partial", "untested") else logging.WARNING
    logger.log(level, "model %s: %s: %s", config.name, text, verdict.reason)
