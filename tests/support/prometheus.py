"""A real Prometheus in a process of its own, on a free port, with a configuration made from the one in deploy/prometheus."""

from __future__ import annotations

import json
import math
import re
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.support.serving import HOST, ROOT, free_port
from tests.support.tools import tool
from tests.support.waiting import until

FOLDER = ROOT / "deploy" / "prometheus"
READY_TIMEOUT_S = 30.0
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)(\{[^}]*\})?")


def read_page(text: str) -> Iterator[Metric]:
    """The families of a page of metrics in Prometheus' text, with the names that stand there.

    The reader of prometheus-client adds `_total` to the samples of counters that lack it, which are Triton's.
    """
    for family in text_string_to_metric_families(text):
        if family.type == "counter" and f"# TYPE {family.name} counter\n" in text:
            family.samples = [sample._replace(name=sample.name.removesuffix("_total")) for sample in family.samples]
        yield family


def configuration(targets: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The configuration that is shipped, in a hurry and with other targets: one scrape configuration for each."""
    shipped: dict[str, Any] = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    assert (FOLDER / "headrace.rules.yml").name in shipped["rule_files"]
    shipped["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    shipped["rule_files"] = [str(FOLDER / name) for name in shipped["rule_files"]]
    (job,) = shipped["scrape_configs"]
    # A target names the file of its own key, or needs none.
    assert set(job.pop("authorization")) == {"credentials_file"}
    relabel = [{"target_label": "job", "replacement": job["job_name"]}]
    shipped["scrape_configs"] = [
        {**job, **target, "job_name": f"{job['job_name']}-{number}", "relabel_configs": relabel}
        for number, target in enumerate(targets)
    ]
    return shipped


@dataclass
class Prometheus:
    """A running one.

    Attributes:
        url: of its HTTP API.
        log: what it prints.
        targets: how many it scrapes.
        at: Unix time of all queries, seconds; empty for now.
    """

    url: str
    log: Path
    targets: int
    at: str = ""

    def get(self, path: str, **parameters: str) -> Any:
        """Return the response of the API; an error raises an AssertionError with its text."""
        body = urllib.parse.urlencode(parameters).encode() if parameters else None
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}", body, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} {parameters}: {error.read().decode()}") from error

    def query(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series at `at`."""
        data = self.get("query", query=expr, **({"time": self.at} if self.at else {}))
        if data["resultType"] == "scalar":
            return [({}, float(data["result"][1]))]
        return [(series["metric"], float(series["value"][1])) for series in data["result"] if "value" in series]

    def value(self, expr: str) -> float:
        """Of the one series that there is."""
        ((_, value),) = self.query(expr)
        return value

    def stop_time(self) -> None:
        """Wait until the last four scrapes of every target succeeded; all queries are of this moment from now on.

        A scrape that takes over a second, on a busy machine, fails: its target has no series until the next one.
        """

        def succeeded() -> bool:
            self.at = f"{time.time():.3f}"
            up = self.query('min_over_time(up{job="headrace"}[4s])')
            return [value for _, value in up] == [1.0] * self.targets

        until(succeeded)

    def scrapes(self) -> int:
        """Return the smallest number of successful scrapes of a target since the start."""
        counts = [value for _, value in self.query('sum_over_time(up{job="headrace"}[1h])')]
        return int(min(counts)) if len(counts) == self.targets else 0


def selectors(expr: str) -> set[str]:
    """Every selector of one of our series in a query, without its range."""
    result = set()
    for match in _SELECTOR.finditer(re.sub(r"\b(?:by|on|without|ignoring) \([^)]*\)", " ", expr)):
        name, labels = match.groups()
        if name.startswith(("headrace_", "headrace:", "process_")) or (name == "up" and labels):
            result.add(name + (labels or ""))
    return result


@contextmanager
def prometheus(folder: Path, targets: Sequence[dict[str, Any]], *options: str) -> Iterator[Prometheus]:
    """For the length of a `with`.

    Args:
        folder: for its configuration, data and log.
        targets: fields of each scrape configuration.
        options: of the command line.
    """
    folder.mkdir(exist_ok=True)
    config = folder / "prometheus.yml"
    config.write_text(yaml.safe_dump(configuration(targets)))
    address = f"{HOST}:{free_port()}"
    words = [tool("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("wb") as stream:
        process = subprocess.Popen([*words, f"--web.listen-address={address}", *options], stdout=stream, stderr=stream)
    running = Prometheus(f"http://{address}", folder / "log", len(targets))
    try:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not _ready(running.url):
            assert process.poll() is None, running.log.read_text()
            assert time.monotonic() < deadline, running.log.read_text()
            time.sleep(0.05)
        yield running
    finally:
        process.terminate()
        process.wait(20)


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=5):
            return True
    except OSError:
        return False


def is_number(value: float) -> bool:
    return math.isfinite(value)
