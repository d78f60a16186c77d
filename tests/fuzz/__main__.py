"""`python -m tests.fuzz`: fuzz the targets with coverage guidance; needs the dependency group `fuzz` (see `make fuzz`).

Starts from tests/fuzz/corpus and works in build/fuzz. Stops with status 1 at the first input that breaks a property, and keeps
that input in build/fuzz/TARGET/found. `--keep` copies the smallest inputs that reached new code to tests/fuzz/corpus.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "tests" / "fuzz" / "corpus"
WORK = ROOT / "build" / "fuzz"
SHARES = {
    "http2": 3.0,
    "hpack": 0.5,
    "grpc_messages": 0.5,
    "protobuf": 1.0,
    "http1": 2.0,
    "json_request": 1.0,
    "config_files": 1.0,
}
MAX_INPUT_BYTES = 4096
MAX_KEPT = 60
_EXECUTIONS = re.compile(r"stat::number_of_executed_units:\s*(\d+)")


def fuzz(target: str, words: list[str]) -> None:
    """Run libFuzzer in this process; it does not return."""
    import atheris

    with atheris.instrument_imports(include=["headrace", "hpack"], enable_loader_override=False):
        from tests.fuzz.targets import check

    atheris.Setup([sys.argv[0], *words], lambda data: check(target, data))
    atheris.Fuzz()


def child(target: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run libFuzzer on a target in a process of its own."""
    command = [sys.executable, "-m", "tests.fuzz", "--in-process", target, *words]
    return subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, errors="replace", check=False)


def run(target: str, seconds: float) -> bool:
    """Fuzz a target; print the executions, and return False if an input breaks a property."""
    folders = [WORK / target / name for name in ("corpus", "found")]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    seeds = CORPUS / target
    start_s = time.monotonic()
    done = child(
        target,
        f"-max_total_time={max(1, round(seconds))}",
        f"-max_len={MAX_INPUT_BYTES}",
        "-timeout=30",
        "-rss_limit_mb=2048",
        "-print_final_stats=1",
        "-verbosity=0",
        f"-artifact_prefix={folders[1]}/",
        str(folders[0]),
        *([str(seeds)] if seeds.is_dir() else []),
    )
    executions = _EXECUTIONS.search(done.stderr)
    count = int(executions[1]) if executions else 0
    print(
        f"{target}: {time.monotonic() - start_s:.0f} s, {count} executions, exit status {done.returncode}", flush=True
    )
    if done.returncode:
        print(done.stderr[-6000:], flush=True)
    return done.returncode == 0


def keep(target: str) -> None:
    """Copy the smallest inputs of build/fuzz to the kept corpus; libFuzzer wrote each because it reached new code."""
    kept = CORPUS / target
    kept.mkdir(parents=True, exist_ok=True)
    found = sorted((WORK / target / "corpus").iterdir(), key=lambda file: (file.stat().st_size, file.name))
    for file in found[:MAX_KEPT]:
        shutil.copyfile(file, kept / file.name[:16])
    print(f"{target}: {len(list(kept.iterdir()))} inputs", flush=True)


def main() -> int:
    """Command line; returns the exit status."""
    if sys.argv[1:2] == ["--in-process"]:
        fuzz(sys.argv[2], sys.argv[3:])
        return 0
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(SHARES)} (all)")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all targets together (60)")
    parser.add_argument(
        "--keep", action="store_true", help="copy the smallest inputs that reached new code to the corpus"
    )
    options = parser.parse_args()
    targets = options.targets or list(SHARES)
    if options.keep:
        for target in targets:
            keep(target)
        return 0
    total = sum(SHARES[target] for target in targets)
    results = [run(target, options.seconds * SHARES[target] / total) for target in targets]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
