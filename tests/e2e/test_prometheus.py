"""A real Prometheus scrapes real servers under load: every query of every panel, rule and alert gives data.

One server has a GPU (a fake, in its process) and every kind of model; the other has TLS, and keys: Prometheus sends the one
with the scope metrics.
"""

from __future__ import annotations

import json
import re
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import pytest
import yaml

from deploy.grafana.dashboards import DASHBOARDS
from deploy.make_keys import KEYS_FILE, make_keys
from tests.support.certificates import Certificates
from tests.support.decoupled_models import REPEAT, REPEAT_CONFIG
from tests.support.fake_builder import publish
from tests.support.fake_gpu import install_gpu
from tests.support.gpu_servers import COMMAND
from tests.support.models import add_model, add_pipeline, affine, ensemble_config, table_lookup
from tests.support.prometheus import FOLDER, Prometheus, is_number, prometheus, read_page, selectors
from tests.support.python_models import add_python_model
from tests.support.ragged_models import token_sums
from tests.support.redis_servers import RedisServer, redis_server
from tests.support.sequence_models import add_echo
from tests.support.serving import HOST, Server, free_port, serving, start
from tests.support.store_servers import s3_client, s3_environment, s3_server
from tests.support.waiting import on_threads, until
from tests.unit.models.test_gpu_backend import plan_of

pytestmark = pytest.mark.slow

INT8 = "max_batch_size: 8\noptimization:\n  precision: int8\n  accuracy: {min_top1_agreement: 0.999}\n"
# Nothing is refused for being late, however busy the machine is.
PROMISED = "max_batch_size: 8\ndynamic_batching: {max_queue_delay_microseconds: 1000}\nslo: {p99_ms: 5000}\n"
SHARED = 'traffic: {stable: 1, versions: {"2": 50%}, shadow: {version: 3, share: 100%}}\n'
REQUESTS = 40  # of each model by each client
CLIENTS = 3
MODELS = ("gpu", "apart", "promised", "engine", "cached")
BODY = json.dumps({"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 16], "data": [1.0] * 16}]}).encode()
PADDED = "max_batch_size: 16\ndynamic_batching: {}\npad: {ids: 0, mask: 0, multiple_of: 16}\n"
TOKENS = json.dumps(
    {"inputs": [{"name": name, "datatype": "INT64", "shape": [1, 5], "data": [1] * 5} for name in ("ids", "mask")]}
).encode()
NUMBERS = json.dumps({"IN": [1, 2, 3], "DELAY": [0, 1, 1], "WAIT": 0}).encode()
SCRAPES = 6


def index_body(index: int) -> bytes:
    """A request of `twice`."""
    return json.dumps({"inputs": [{"name": "X", "datatype": "INT64", "shape": [1, 1], "data": [index]}]}).encode()


def sequence_body(sequence_id: int, **flags: bool) -> bytes:
    """A request of `sequence`."""
    x = {"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}
    return json.dumps({"inputs": [x], "parameters": {"sequence_id": sequence_id, **flags}}).encode()


RULES = [
    rule
    for name in ("headrace.rules.yml", "headrace.alerts.yml")
    for group in yaml.safe_load((FOLDER / name).read_text())["groups"]
    for rule in group["rules"]
]
PANELS = [
    pytest.param(target["expr"], id=f"{dashboard.uid}: {panel['title']} {target['refId']}")
    for dashboard in DASHBOARDS
    for panel in dashboard.to_json()["panels"]
    for target in panel.get("targets", [])
]
# (data source's series, label) of each variable that Grafana fills by label_values().
VARIABLES = {
    re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
    for dashboard in DASHBOARDS
    for variable in dashboard.to_json()["templating"]["list"]
    if variable["type"] == "query"
}
ANNOTATIONS = {
    annotation["name"]: annotation["target"]["expr"]
    for dashboard in DASHBOARDS
    for annotation in dashboard.to_json()["annotations"]["list"]
}

# Queries of the panels of public dashboards for Triton, or queries of equal effect. NVIDIA's are in the folder deploy of
# triton-inference-server/server. Left out: nv_inference_load_ratio_bucket and nv_inference_compute_duration_us of its
# dashboards for fleetcommand, gcp and single_server, which Triton 2 does not have either.
_PER_REQUEST = "nv_inference_request_success[1m]"
TRITON_PANELS = {
    "k8s-onprem: active instances": "count(count by (instance) (nv_inference_count))",
    "k8s-onprem: share of each pod": "sum by (pod) (rate(nv_inference_count[1m])) / ignoring(pod) group_left() "
    "sum(rate(nv_inference_count[1m]))",
    "k8s-onprem: successes": "sum by (pod) (nv_inference_request_success)",
    "k8s-onprem: failures": "sum by (pod) (nv_inference_request_failure)",
    "k8s-onprem: compute time": "sum by (model) (rate(nv_inference_compute_infer_duration_us[30s])) / 1000",
    "k8s-onprem: mean time in the queue": "avg by (pod) (rate(nv_inference_queue_duration_us[30s]) / "
    "(1 + rate(nv_inference_request_success[30s])))",
    "fleetcommand: successes": "nv_inference_request_success",
    "fleetcommand: failures": "nv_inference_request_failure",
    "fleetcommand: time in the queue": "rate(nv_inference_queue_duration_us[30s]) / 1000",
    "TerboucheHacene: rate of failures": "rate(nv_inference_request_failure[1m])",
    "TerboucheHacene: batch size": f"rate({_PER_REQUEST}) / rate(nv_inference_exec_count[1m])",
    "TerboucheHacene: mean duration": "nv_inference_request_duration_us / nv_inference_request_success / 1000",
    "TerboucheHacene: GPU utilization": "nv_gpu_utilization",
    "TerboucheHacene: GPU memory": "nv_gpu_memory_used_bytes / nv_gpu_memory_total_bytes * 100",
    "TerboucheHacene: compute time of a batch": "rate(nv_inference_compute_infer_duration_us[1m]) / "
    "rate(nv_inference_exec_count[1m]) / 1000",
    "others: rows a second": 'sum(rate(nv_inference_count{model=~".+"}[1m]))',
    "others: share of errors": "sum by (model) (rate(nv_inference_request_failure[1m])) / "
    f"sum by (model) (rate({_PER_REQUEST}))",
    "others: failures by reason": 'sum by (reason) (nv_inference_request_failure{reason="REJECTED"})',
    "others: load time": "nv_model_load_duration_secs",
    "others: pending": "nv_inference_pending_request_count",
    "others: power": "nv_gpu_power_usage / nv_gpu_power_limit",
    "others: energy": "rate(nv_energy_consumption[1m])",
    "others: processors": "nv_cpu_utilization",
    "others: memory": "nv_cpu_memory_used_bytes / nv_cpu_memory_total_bytes",
    "others: pinned memory": "nv_pinned_memory_pool_used_bytes <= nv_pinned_memory_pool_total_bytes",
    "others: cache hits": "rate(nv_cache_num_hits_per_model[1m]) / "
    "(rate(nv_cache_num_hits_per_model[1m]) + rate(nv_cache_num_misses_per_model[1m]))",
    "others: cache lookups": "nv_cache_hit_duration_per_model / nv_cache_num_hits_per_model",
    "others: cache insertions": "nv_cache_miss_duration_per_model / nv_cache_num_misses_per_model",
    "others: first responses": "histogram_quantile(0.99, sum by (le) "
    "(rate(nv_inference_first_response_histogram_ms_bucket[1m])))",
    **{
        f"others: quantile of {name}": f'nv_inference_{name}_summary_us{{quantile="{quantile}"}} / 1000'
        for name in ("request", "queue", "compute_input", "compute_infer", "compute_output")
        for quantile in ("0.5", "0.9", "0.95", "0.99", "0.999")
    },
    **{
        f"others: mean of {name}": f"rate(nv_inference_{name}_duration_us[1m]) / rate({_PER_REQUEST})"
        for name in ("request", "queue", "compute_input", "compute_infer", "compute_output")
    },
}
# Type and labels of each metric on Triton's page.
_MODEL = {"model", "version"}
TRITON_SERIES: dict[str, tuple[str, set[str]]] = {
    **{
        f"nv_inference_{name}": ("counter", _MODEL)
        for name in (
            *("request_success", "count", "exec_count", "request_duration_us", "queue_duration_us"),
            *("compute_input_duration_us", "compute_infer_duration_us", "compute_output_duration_us"),
        )
    },
    "nv_inference_request_failure": ("counter", {*_MODEL, "reason"}),
    **{
        f"nv_inference_{name}_summary_us": ("summary", {*_MODEL, "quantile"})
        for name in ("request", "queue", "compute_input", "compute_infer", "compute_output")
    },
    **{
        f"nv_cache_{name}_per_model": ("counter", _MODEL)
        for name in ("num_hits", "num_misses", "hit_duration", "miss_duration")
    },
    **{f"nv_cache_{name}_summary_us": ("summary", _MODEL) for name in ("hit", "miss")},
    "nv_inference_first_response_histogram_ms": ("histogram", {*_MODEL, "le"}),
    "nv_inference_pending_request_count": ("gauge", _MODEL),
    "nv_model_load_duration_secs": ("gauge", _MODEL),
    "nv_pinned_memory_pool_total_bytes": ("gauge", set()),
    "nv_pinned_memory_pool_used_bytes": ("gauge", set()),
    "nv_cpu_utilization": ("gauge", set()),
    "nv_cpu_memory_total_bytes": ("gauge", set()),
    "nv_cpu_memory_used_bytes": ("gauge", set()),
    **{
        f"nv_gpu_{name}": ("gauge", {"gpu_uuid"})
        for name in ("utilization", "memory_total_bytes", "memory_used_bytes", "power_usage", "power_limit")
    },
    "nv_energy_consumption": ("counter", {"gpu_uuid"}),
}


def build(folder: Path) -> Path:
    repository = folder / "repository"
    with pytest.MonkeyPatch.context() as patch:
        install_gpu(patch)
        model = add_model(repository, "gpu", affine(seed=1))
        (model / "config.yaml").write_text("backend: tensorrt\nmax_batch_size: 8\n")
        (model / "1" / "model.plan").write_bytes(plan_of(folder, 1))
    add_model(repository, "cached", affine(), files={"config.yaml": "response_cache: {enable: true}\n"})
    add_model(repository, "apart", affine(), files={"config.yaml": "isolation: process\n"})
    add_model(repository, "promised", affine(), files={"config.yaml": PROMISED})
    for version in (1, 2, 3):
        add_model(repository, "shared", affine(), version=version, files={"config.yaml": SHARED})
    model = add_model(repository, "engine", affine(), files={"config.yaml": INT8})
    engine = onnx.load(model / "1" / "model.onnx").SerializeToString()
    publish(model, 1, engine, forced=True, refusal=("top-1 agreement 98.8 % is below 99.9 %",))
    # The second step refuses what the first one answers for an index of 3.
    add_model(repository, "lookup", table_lookup(), config="max_batch_size: 8")
    steps = [("lookup", {"X": "X"}, {"Y": "tens"}), ("lookup", {"X": "tens"}, {"Y": "Y"})]
    number = {"X": ("TYPE_INT64", (1,))}, {"Y": ("TYPE_INT64", (1,))}
    add_pipeline(repository, "twice", ensemble_config(steps, *number))
    add_python_model(repository, "numbers", REPEAT, REPEAT_CONFIG)
    add_echo(repository, "sequence", "direct { }")
    add_model(repository, "padded", token_sums(), files={"config.yaml": PADDED})
    # There are no samples, so the builder fails at once.
    unbuilt = INT8 + "  calibration: {data: missing.npz}\nbuild_on_load: true\n"
    add_model(repository, "unbuilt", affine(), files={"config.yaml": unbuilt})
    return repository


@dataclass
class Watched:
    """Both servers and both Prometheuses, once the load is over and has been scraped."""

    gpu: Server
    tls: Server
    classic: Prometheus
    native: Prometheus
    gpu_metrics: str


def work(server: Server) -> None:
    """Every model, and what is refused."""

    def client(number: int) -> None:
        for index in range(REQUESTS):
            assert server.request("POST", "/v2/models/numbers/generate_stream", NUMBERS)[0] == 200
            sequence_id = 1 + number * REQUESTS + index
            # The last request of each sequence comes again, after its end.
            for flags, status in (({"sequence_start": True}, 200), ({"sequence_end": True}, 200), ({}, 400)):
                body = sequence_body(sequence_id, **flags)
                assert server.request("POST", "/v2/models/sequence/infer", body)[0] == status
            for model in MODELS:
                assert server.request("POST", f"/v2/models/{model}/infer", BODY)[0] == 200
            assert server.request("POST", "/v2/models/padded/infer", TOKENS)[0] == 200
            assert server.request("POST", "/v2/models/shared/infer", BODY)[0] == 200
            for row, status in ((0, 200), (3, 400)):
                assert server.request("POST", "/v2/models/twice/infer", index_body(row))[0] == status
            assert server.request("POST", "/v2/models/promised/infer", b"{}")[0] == 400
            assert server.request("POST", "/v2/models/nobody/infer", BODY)[0] == 404

    on_threads(client, range(CLIENTS))
    assert server.request("POST", "/v2/repository/models/promised/load", b"{}")[0] == 200


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@contextmanager
def bucket() -> Iterator[tuple[str, dict[str, str]]]:
    """A model repository in S3: its URL, and the variables with which a server reads it."""
    with s3_server() as port:
        s3 = s3_client(port)
        s3.create_bucket(Bucket="second")
        for path, content in (("config.yaml", b"keep_loaded: true\n"), ("1/model.onnx", affine().SerializeToString())):
            s3.put_object(Bucket="second", Key=f"models/affine/{path}", Body=content)
        yield "s3://second/models", s3_environment(port)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, redis: RedisServer) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("prometheus")
    repository, certificates = build(folder), Certificates(folder)
    port = free_port()
    control = ("--metrics-port", str(port), "--model-control", "explicit", "--load-model", "*")
    control += ("--cache-config", "local,size=16MiB", "--cache-config", redis.patient_option)
    tls = ("--tls-cert", str(certificates.server.certificate), "--tls-key", str(certificates.server.key), "--no-grpc")
    tls += ("--front-ends", "1")  # its processes have metrics of their own
    tls += ("--host-memory-budget", "1GiB", "--repository-cache-dir", str(folder / "copies"))
    make_keys(folder)
    tls += ("--api-keys-file", str(folder / KEYS_FILE))
    with start(repository, folder / "gpu.log", *control, command=COMMAND) as gpu:
        gpu.wait_until_ready()
        with bucket() as (url, env), serving(url, folder, *tls, env=env) as secure:
            targets: list[dict[str, Any]] = [
                {"static_configs": [{"targets": [f"{HOST}:{port}"]}]},
                {
                    "static_configs": [{"targets": [secure.address]}],
                    "scheme": "https",
                    "tls_config": {"ca_file": str(certificates.authority)},
                    "authorization": {"credentials_file": str(folder / "metrics.key")},
                },
            ]
            feature = "--enable-feature=native-histograms,exemplar-storage"
            with (
                prometheus(folder / "classic", targets) as classic,
                prometheus(folder / "native", targets, feature) as native,
            ):
                until(lambda: classic.scrapes() >= 1 and native.scrapes() >= 1)
                work(gpu)
                until(lambda: classic.scrapes() >= SCRAPES and native.scrapes() >= SCRAPES)
                # What the rules have made of the last scrape.
                until(lambda: len(classic.query("headrace:requests:rate5m")) == len(MODELS) + 8)
                scrapes = classic.scrapes() + 2
                until(lambda: classic.scrapes() >= scrapes)
                classic.stop_time()
                native.stop_time()
                yield Watched(gpu, secure, classic, native, f"{HOST}:{port}")
        gpu.stop()


def filled(expr: str) -> str:
    """A panel's query with the values that its variables have."""
    for name, value in {"$__rate_interval": "1m", "$job": "headrace", "$model": ".+"}.items():
        expr = expr.replace(name, value)
    assert "$" not in expr
    return expr


def test_both_servers_are_scraped(watched: Watched) -> None:
    def states(one: Prometheus) -> list[tuple[str, str]]:
        return [(each["health"], each["lastError"]) for each in one.get("targets?state=active")["activeTargets"]]

    for one in (watched.classic, watched.native):
        until(lambda one=one: states(one) == [("up", "")] * 2)


def test_metrics_need_the_key_that_prometheus_sends(watched: Watched) -> None:
    folder = watched.tls.log.parent
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    for name, expected in ((None, 401), ("infer", 403), ("metrics", 200)):
        headers = {"Authorization": f"Bearer {(folder / f'{name}.key').read_text().strip()}"} if name else {}
        request = urllib.request.Request(f"https://{watched.tls.address}/metrics", headers=headers)
        try:
            status = urllib.request.urlopen(request, timeout=30, context=context).status
        except urllib.error.HTTPError as error:
            status = error.code
        assert status == expected, name


def test_nothing_is_lost_between_the_server_and_prometheus(watched: Watched) -> None:
    for model in ("gpu", "apart", "engine"):
        requests = watched.classic.value(f'headrace_requests_total{{model="{model}"}}')
        assert requests == REQUESTS * CLIENTS
        assert watched.classic.value(f'headrace_total_seconds_bucket{{model="{model}",le="+Inf"}}') == requests
        assert watched.native.value(f'histogram_count(headrace_total_seconds{{model="{model}"}})') == requests
    assert watched.classic.value('headrace_errors_total{protocol="http",reason="not_found"}') == REQUESTS * CLIENTS
    loads = {
        labels["result"]: value
        for labels, value in watched.classic.query('headrace_model_loads_total{model="promised"}')
    }
    assert loads == {"loaded": 1, "reloaded": 0, "unloaded": 0, "failed": 0}, "the files had not changed"


@pytest.mark.parametrize("expr", PANELS)
def test_every_panel_has_data(watched: Watched, expr: str) -> None:
    query_values = watched.classic.query(filled(expr))
    assert query_values, expr
    assert any(is_number(value) for _, value in query_values), f"{expr} is {query_values[:3]}"


@pytest.mark.parametrize("panel", TRITON_PANELS)
def test_every_panel_of_a_dashboard_for_triton_has_data(watched: Watched, panel: str) -> None:
    query_values = watched.classic.query(TRITON_PANELS[panel])
    assert any(is_number(value) for _, value in query_values), f"{TRITON_PANELS[panel]} is {query_values[:3]}"


def test_metrics_have_tritons_types_and_labels(watched: Watched) -> None:
    page = urllib.request.urlopen(f"http://{watched.gpu_metrics}/metrics", timeout=30).read().decode()
    shown = {family.name: family for family in read_page(page) if family.name.startswith("nv_")}
    assert {name: family.type for name, family in shown.items()} == {
        name: kind for name, (kind, _) in TRITON_SERIES.items()
    }
    for name, family in shown.items():
        assert set().union(*(sample.labels for sample in family.samples)) == TRITON_SERIES[name][1], name


@pytest.mark.parametrize("name", ["nv_inference_request_success", "nv_energy_consumption"])
def test_prometheus_accepts_counters_without_the_suffix(watched: Watched, name: str) -> None:
    for one in (watched.classic, watched.native):
        assert one.query(name)
        assert one.query(f"rate({name}[1m])")


@pytest.mark.parametrize(("series", "label"), sorted(VARIABLES))
def test_every_variable_has_values(watched: Watched, series: str, label: str) -> None:
    """Values of Grafana's variables, read as Grafana does."""
    query = urllib.parse.urlencode({"match[]": filled(series)})
    values = set(watched.classic.get(f"label/{label}/values?{query}"))
    assert values == {"headrace"} if label == "job" else values >= set(MODELS), values


def test_annotations_mark_events(watched: Watched) -> None:
    marks = {labels["alertname"] for labels, _ in watched.classic.query(filled(ANNOTATIONS["Alerts"]))}
    assert "HeadraceAccuracyGateFailed" in marks
    loads = filled(ANNOTATIONS["Loads"])
    assert loads.endswith(" > 0"), "nothing has been loaded since the first scrape"
    assert watched.classic.query(loads.removesuffix(" > 0"))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("record") or rule["alert"])
def test_every_rule_has_data(watched: Watched, rule: dict[str, Any]) -> None:
    """An alert has none while all is well; what it looks at has."""
    query_values = watched.classic.query(rule["expr"])
    if "record" in rule:
        assert any(is_number(value) for _, value in query_values)
        assert watched.classic.query(rule["record"])
    selected = selectors(rule["expr"])
    assert selected
    for selector in selected:
        assert watched.classic.query(selector), selector


def test_prometheus_evaluates_every_rule_without_a_fault(watched: Watched) -> None:
    groups = watched.classic.get("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == len(RULES)
    assert [(rule["name"], rule.get("lastError", "")) for rule in rules if rule["health"] != "ok"] == []


def test_the_accuracy_alert_fires(watched: Watched) -> None:
    alerts: list[Any] = []

    def fires() -> bool:
        alerts[:] = watched.classic.get("alerts")["alerts"]
        firing = [(each["labels"]["alertname"], each["labels"].get("model"), each["state"]) for each in alerts]
        return ("HeadraceAccuracyGateFailed", "engine", "firing") in firing

    until(fires)
    for alert in alerts:
        assert "error expanding template" not in str(alert["annotations"])
    (accuracy,) = [alert for alert in alerts if alert["labels"]["alertname"] == "HeadraceAccuracyGateFailed"]
    assert accuracy["annotations"]["summary"] == "engine is served by an engine below its accuracy bar (int8)"


@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.99])
def test_native_histograms_agree_and_are_more_exact(watched: Watched, quantile: float) -> None:
    native = watched.native.value(f"histogram_quantile({quantile}, sum(headrace_total_seconds))")
    classic = watched.classic.value(f"histogram_quantile({quantile}, sum by (le) (headrace_total_seconds_bucket))")
    bounds = sorted(
        {float(labels["le"]) for labels, _ in watched.classic.query("headrace_total_seconds_bucket")} | {0.0}
    )
    lower = max(bound for bound in bounds if bound < classic)
    upper = min(bound for bound in bounds if bound >= classic)
    assert lower / 1.1 <= native <= upper * 1.1
    assert watched.native.query("headrace_total_seconds_bucket") == [], "Prometheus keeps one kind"


def test_metrics_are_served_on_their_own_port_only(watched: Watched) -> None:
    """The metrics have a port of their own there, and the HTTP port has none."""
    assert watched.gpu.request("GET", "/metrics")[0] == 404
