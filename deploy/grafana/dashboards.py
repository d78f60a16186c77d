"""`python -m deploy.grafana.dashboards` writes the dashboards of Grafana: overview, one model, GPUs, capacity.

Names of metrics are those of docs/metrics.md, recorded series those of deploy/prometheus/headrace.rules.yml.
"""

from __future__ import annotations

import json
from pathlib import Path

from deploy.grafana.panels import Dashboard, Panel, Query, Row

FOLDER = Path(__file__).parent / "dashboards"
J = 'job=~"$job"'
M = 'job=~"$job",model=~"$model"'
RATE = "[$__rate_interval]"
GOOD_LOW = ((None, "green"), (0.01, "orange"), (0.144, "red"))


def _stat(title: str, expr: str, unit: str = "short", steps: object = ((None, "blue"),), about: str = "") -> Panel:
    return Panel(title, [Query(expr)], unit, about, "stat", 4, 4, steps=steps)  # type: ignore[arg-type]


def _quantile(quantile: float, metric: str, selector: str, by: str = "le") -> str:
    return f"histogram_quantile({quantile:g}, sum by ({by}) (rate({metric}_bucket{{{selector}}}{RATE})))"


def _mean(metric: str) -> str:
    return f"sum(rate({metric}_sum{{{M}}}{RATE})) / sum(rate({metric}_count{{{M}}}{RATE}))"


OVERVIEW = Dashboard(
    "headrace-overview",
    "Headrace / Overview",
    "Health of all models and replicas of a job.",
    [
        Row(
            "Now",
            [
                _stat("Replicas up", f"sum(up{{{J}}})"),
                _stat("Ready", f"min(headrace_ready{{{J}}})", steps=((None, "red"), (1, "green"))),
                _stat("Alerts", 'count(ALERTS{alertname=~"Headrace.+",alertstate="firing"}) or vector(0)',
                      steps=((None, "green"), (1, "red"))),
                _stat("Requests/s", f"sum(headrace:requests:rate5m{{{J}}})", "reqps"),
                _stat("Worst p99", f"max(headrace:total_seconds:p99_5m{{{J}}})", "s"),
                _stat("Late or unserved, 1 h", f"max(headrace:bad:ratio_rate1h{{{J}}})", "percentunit", GOOD_LOW,
                      "The worst model's share; the budget is 1 %."),
            ],
        ),
        Row(
            "Traffic",
            [
                Panel("Requests", [Query(f"sum by (model) (rate(headrace_requests_total{{{J}}}{RATE}))", "{{model}}")],
                      "reqps", stacked=True),
                Panel("p99", [Query(_quantile(0.99, "headrace_total_seconds", J, "model, le"), "{{model}}")], "s",
                      "From arrival to response.", exemplars=True),
                Panel("Refused and failed", [Query(f"sum by (model, reason) (rate(headrace_failures_total{{{J}}}{RATE})) > 0 "
                      f"or sum(rate(headrace_failures_total{{{J}}}{RATE}))", "{{model}} {{reason}}")], "reqps",
                      "overloaded, would_miss: no capacity. quota: a client over its quota. cancelled: by the client."),
                Panel("Queue", [Query(f"sum by (model) (headrace_queue_depth{{{J}}})", "{{model}}")],
                      description="Requests in the queue."),
                Panel("Predicted wait", [Query(f"max by (model) (headrace_predicted_wait_seconds{{{J}}})", "{{model}}")], "s",
                      "Of a new request."),
                Panel("Busy", [Query(f"headrace:busy:ratio_rate5m{{{J}}}", "{{model}}")], "percentunit",
                      "Share of the time in which instances run batches; near 100 % the queue grows.", most=1),
                Panel("Rows a batch", [Query(f"headrace:batch_rows:mean5m{{{J}}}", "{{model}}")],
                      description="1 means that nothing is merged: too few arrivals, or no dynamic_batching."),
                Panel("In flight", [Query(f"sum by (model) (headrace_in_flight{{{J}}})", "{{model}}")]),
                Panel("Errors by protocol", [Query(f"sum by (protocol, reason) (rate(headrace_errors_total{{{J}}}{RATE}))",
                      "{{protocol}} {{reason}}")], "reqps", "With or without a model."),
            ],
        ),
        Row(
            "Models",
            [
                Panel("States", [Query(f"headrace_model_state{{{J}}} == 1")], kind="table", width=12),
                Panel("Instances missing", [Query(
                    f"sum by (instance, model) (headrace_instances_wanted{{{J}}} - headrace_instances{{{J}}})",
                    "{{instance}} {{model}}")], width=6),
                Panel("Loads", [Query(f"sum by (model, result) (increase(headrace_model_loads_total{{{J}}}{RATE}))",
                      "{{model}} {{result}}")], width=6),
                Panel("Engines", [Query(f"headrace_engine_info{{{J}}}")], kind="table", width=12, height=6),
                Panel("Accuracy against FP32", [Query(f"headrace_engine_accuracy{{{J}}}", "{{model}} {{measure}}")],
                      "percentunit", width=6, height=6),
                Panel("Engines built", [Query(f"sum by (model, result) (increase(headrace_engine_builds_total{{{J}}}[1h]))",
                      "{{model}} {{result}}")], width=6, height=6),
                Panel("Repositories in stores", [
                    Query(f"count(headrace_repository_reachable{{{J}}} == 0) or vector(0)", "not reachable"),
                    Query(f'sum(increase(headrace_repository_syncs_total{{{J},result="failed"}}[1h])) or vector(0)',
                          "failed comparisons in an hour")], width=12, height=6),
                Panel("Downloads from stores", [
                    Query(f"sum(rate(headrace_repository_downloaded_bytes_total{{{J}}}{RATE})) or vector(0)", "read")],
                      "Bps", width=12, height=6),
            ],
        ),
        Row(
            "Processes",
            [
                Panel("Event loop lag, p99", [Query(_quantile(0.99, "headrace_event_loop_lag_seconds", J, "instance, le"),
                      "{{instance}}")], "s", "Every request waits as long for the front end."),
                Panel("Memory", [
                    Query(f"process_resident_memory_bytes{{{J}}}", "{{instance}}"),
                    Query(f"headrace_body_bytes{{{J}}}", "{{instance}} bodies of requests"),
                    Query(f"headrace_unread_bytes{{{J}}}", "{{instance}} unread responses")], "bytes"),
                Panel("Host memory of models", [
                    Query(f"sum by (instance) (headrace_host_memory_bytes{{{J}}})", "{{instance}}"),
                    Query(f"headrace_host_memory_limit_bytes{{{J}}}", "{{instance}} budget")], "bytes",
                      "With --host-memory-budget; beyond it models are evicted."),
                Panel("Models in memory", [
                    Query(f"headrace_host_resident_versions{{{J}}}", "{{instance}}")],
                      description="With --host-memory-budget: the others are loaded by their next request."),
                Panel("CPU", [Query(f"rate(process_cpu_seconds_total{{{J}}}{RATE})", "{{instance}}")], "short", "Cores in use."),
                Panel("Connections", [Query(f"headrace_connections{{{J}}}", "{{instance}} {{protocol}}")]),
                Panel("File descriptors", [Query(f"process_open_fds{{{J}}} / process_max_fds{{{J}}}", "{{instance}}")],
                      "percentunit", "Of the limit."),
                Panel("Threads", [Query(f"headrace_threads{{{J}}}", "{{instance}}")]),
                Panel("Limits reached", [
                    Query(f"sum by (protocol, limit) (rate(headrace_limit_hits_total{{{J}}}{RATE}))", "{{protocol}} {{limit}}")],
                      "reqps", "Each is an option of headrace serve; the table beside has the values in force."),
                Panel("Unproven batch sizes", [
                    Query(f"headrace_unproven_batch_sizes{{{J}}}", "{{instance}} {{model}} {{version}}"),
                    Query(f"increase(headrace_row_differences_total{{{J}}}[1h])",
                          "{{instance}} {{model}} {{version}}: rows")],
                      description="Sizes that change answers, and rows of the last hour that had other outputs alone; headrace "
                      "explain has the reason."),
                Panel("Restarts", [
                    Query(f"sum by (instance, model) (increase(headrace_instance_restarts_total{{{J}}}[1h]))",
                          "{{instance}} {{model}} instances"),
                    Query(f"sum by (instance, model) (increase(headrace_model_process_restarts_total{{{J}}}[1h]))",
                          "{{instance}} {{model}} process")], description="In the last hour."),
                Panel("Processes", [
                    Query(f"headrace_process_up{{{J}}}", "{{instance}} {{process}} runs"),
                    Query(f"increase(headrace_process_starts_total{{{J}}}[1h])", "{{instance}} {{process}} starts")],
                      description="Of a server with front-end processes; starts in the last hour."),
                Panel("CPU by process", [
                    Query(f"rate(headrace_process_cpu_seconds_total{{{J}}}{RATE})", "{{instance}} {{process}}")], "short",
                      "Cores in use by each process of a server with front-end processes."),
                Panel("Memory by process", [
                    Query(f"headrace_process_resident_memory_bytes{{{J}}}", "{{instance}} {{process}}")], "bytes",
                      "Shared memory counts in each process that uses it."),
                Panel("Connections by process", [
                    Query(f"headrace_process_connections{{{J}}}", "{{instance}} {{process}}"),
                    Query(f"increase(headrace_process_connections_moved_total{{{J}}}[5m])", "{{instance}} {{process}} moved")],
                      description="Each front end has about as many as the others."),
                Panel("Work over capacity", [Query(f"headrace_server_utilization_ratio{{{J}}}", "{{instance}}")], "percentunit",
                      "What load reports tell balancers; over 100 % if work waits."),
                Panel("Requests of all models", [
                    Query(f"headrace_server_queue_depth{{{J}}}", "{{instance}} in queues"),
                    Query(f"headrace_server_in_flight{{{J}}}", "{{instance}} in flight")]),
                Panel("Longest predicted wait", [
                    Query(f"headrace_server_predicted_wait_seconds{{{J}}}", "{{instance}}")], "s",
                      "Of a new request of one row, of all models."),
                Panel("Certificate", [
                    Query(f"headrace_tls_certificate_expiry_timestamp_seconds{{{J}}} - time()", "{{instance}}")], "s",
                      "Time until it expires; no data without TLS."),
                Panel("Telemetry dropped", [
                    Query(f"sum by (instance, kind) (increase(headrace_telemetry_dropped_total{{{J}}}[1h]))",
                          "{{instance}} {{kind}}")],
                      description="Spans, traces and lines of the request log that were dropped, in the last hour."),
                Panel("Limits", [Query(f"headrace_limit{{{J}}}")], kind="table"),
                Panel("Versions", [Query(f"headrace_build_info{{{J}}}")], kind="table", height=5),
            ],
        ),
    ],
)  # fmt: skip

_PHASES = ("decode", "queue", "assemble", "compute", "split", "encode")
MODEL = Dashboard(
    "headrace-model",
    "Headrace / One model",
    "Phases, batches and load of one model.",
    [
        Row(
            "Time",
            [
                Panel("From arrival to response", [
                    *(Query(_quantile(q, "headrace_total_seconds", M), f"p{q * 100:g}") for q in (0.5, 0.95, 0.99)),
                    Query(f"max(headrace_objective_seconds{{{M}}})", "objective")], "s",
                    "The objective is the configuration's slo.", width=12, exemplars=True),
                Panel("Phases, mean", [Query(_mean(f"headrace_{phase}_seconds"), phase) for phase in _PHASES], "s",
                    "decode: read the request. queue: wait for an instance. assemble: gather the rows of a batch. "
                    "compute: run the model. split: divide the outputs. encode: return to the event loop and write the "
                    "response.", width=12, stacked=True),
                Panel("All answers", [Query(f"sum by (le) (rate(headrace_total_seconds_bucket{{{M}}}{RATE}))", "{{le}}")], "s",
                      kind="heatmap", width=12),
                Panel("p99 of each phase", [
                    Query(_quantile(0.99, f"headrace_{phase}_seconds", M), phase) for phase in _PHASES], "s", width=12),
                Panel("First response of a decoupled model", [
                    Query(_quantile(q, "headrace_first_response_seconds", M), f"p{q * 100:g}") for q in (0.5, 0.95, 0.99)],
                    "s", "From the arrival of a request.", width=12),
                Panel("Between responses of a decoupled model", [
                    Query(_quantile(q, "headrace_inter_response_seconds", M), f"p{q * 100:g}") for q in (0.5, 0.95, 0.99)],
                    "s", "For a language model: the time between two tokens.", width=12),
            ],
        ),
        Row(
            "Batches",
            [
                Panel("Rows a batch", [
                    Query(_mean("headrace_batch_rows"), "mean"),
                    Query(_quantile(0.5, "headrace_batch_rows", M), "p50"),
                    Query(_quantile(0.99, "headrace_batch_rows", M), "p99")]),
                Panel("Batches by close reason", [
                    Query(f"sum by (closed_by) (rate(headrace_batches_total{{{M}}}{RATE}))", "{{closed_by}}")], "ops",
                    "idle: an instance was free (not busy). full, preferred: batches fill (busy). delay: waited in vain. "
                    "deadline: a member would have been late.", stacked=True),
                Panel("Compute time of a batch", [
                    Query(f'max by (rows) (headrace_profile_microseconds{{{M},quantile="0.5"}})', "{{rows}} rows")], "µs",
                    "The latency table of the scheduler: measured at load, corrected by every batch."),
                Panel("Runs on the event loop", [
                    Query(f"sum(rate(headrace_inline_runs_total{{{M}}}{RATE}))", "lone requests"),
                    Query(f"sum(rate(headrace_inline_disabled_total{{{M}}}{RATE}))", "too slow: off for a while")], "ops",
                    "Lone requests of a fast CPU model run without a thread switch."),
                Panel("Share of padding", [
                    Query("headrace:padding:ratio_rate5m" + f"{{{M}}}", "{{model}}")], "percentunit",
                    "Of rows times length of the batches of a model with pad: computed for nothing."),
            ],
        ),
        Row(
            "Response cache",
            [
                Panel("Requests", [
                    Query(f"sum by (model) (rate(headrace_cache_hits_total{{{M}}}{RATE}))", "{{model}} hits"),
                    Query(f"sum by (model) (rate(headrace_cache_merged_total{{{M}}}{RATE}))", "{{model}} merged"),
                    Query(f"sum by (model) (rate(headrace_cache_misses_total{{{M}}}{RATE}))", "{{model}} misses")], "reqps",
                    "Merged: answered with the response of an equal request that was in flight."),
                Panel("Entries", [
                    Query(f"sum by (model) (rate(headrace_cache_insertions_total{{{M}}}{RATE}))", "{{model}} inserted"),
                    Query(f"sum by (model) (rate(headrace_cache_evictions_total{{{M}}}{RATE}))", "{{model}} evicted"),
                    Query(f"sum by (model) (rate(headrace_cache_expirations_total{{{M}}}{RATE}))", "{{model}} expired")], "ops"),
                Panel("Memory", [Query(f"sum by (model) (headrace_cache_bytes{{{M}}})", "{{model}}")], "bytes"),
                Panel("Responses in the cache", [
                    Query(f"sum by (model) (headrace_cache_entries{{{M}}})", "{{model}}"),
                    Query(f"min by (model) (headrace_cache_enabled{{{M}}})", "{{model}} enabled (1) or off (0)")], "short",
                    "A cache switches itself off while its hits do not pay for it."),
                Panel("Redis", [
                    Query(f"sum by (model, result) (rate(headrace_cache_redis_lookups_total{{{M}}}{RATE}))",
                          "{{model}} {{result}}"),
                    Query(f"sum by (model, result) (rate(headrace_cache_redis_writes_total{{{M}}}{RATE}))",
                          "{{model}} write {{result}}")], "ops", "Responses that several servers share."),
                Panel("Redis answers", [
                    Query(f"min by (model) (headrace_cache_redis_up{{{M}}})", "{{model}}")], "short",
                    "0: requests are served without Redis until it answers in time again."),
            ],
        ),
        Row(
            "Sequences",
            [
                Panel("Sequences and slots", [
                    Query(f"sum by (model) (headrace_sequences{{{M}}})", "{{model}} live"),
                    Query(f"sum by (model) (headrace_sequence_slots_used{{{M}}})", "{{model}} slots in use"),
                    Query(f"sum by (model) (headrace_sequence_slots{{{M}}})", "{{model}} slots")], "short",
                    "Live sequences without a slot are in the backlog."),
                Panel("Backlog", [Query(f"sum by (model) (headrace_sequence_backlog{{{M}}})", "{{model}}")], "short",
                      "Sequences that wait for a slot."),
                Panel("Ends", [
                    Query(f"sum by (model, reason) (rate(headrace_sequence_ends_total{{{M}}}{RATE}))", "{{model}} {{reason}}")],
                    "ops", "idle: no request for the idle time. cancelled: a queued request was cancelled or timed out. died: "
                    "the instance with its state.", stacked=True),
                Panel("Refused requests", [
                    Query(f"sum by (model, reason) (rate(headrace_sequence_refusals_total{{{M}}}{RATE}))",
                          "{{model}} {{reason}}")], "reqps", "not_live: no START, and the sequence has ended."),
            ],
        ),
        Row(
            "Steps of a pipeline",
            [
                Panel("p50 of each step", [
                    Query(_quantile(0.5, "headrace_step_seconds", M, "le, model, step"), "{{model}}: {{step}}")], "s",
                    "From the queue of the step to its result. The longest one limits the pipeline."),
                Panel("p99 of each step", [
                    Query(_quantile(0.99, "headrace_step_seconds", M, "le, model, step"), "{{model}}: {{step}}")], "s"),
                Panel("Outcomes", [
                    Query(f"sum by (model, step, outcome) (rate(headrace_step_requests_total{{{M}}}{RATE}))",
                          "{{model}}: {{step}} {{outcome}}")], "reqps", "fallback: its model failed or would have been late."),
                Panel("Wasted compute", [
                    Query(f"sum by (model, step) (rate(headrace_step_wasted_seconds_total{{{M}}}{RATE}))",
                          "{{model}}: {{step}}")], "s",
                    "Seconds a second, for requests that got an error in a later step."),
            ],
        ),
        Row(
            "Load",
            [
                Panel("Requests and rows", [
                    Query(f"sum(rate(headrace_requests_total{{{M}}}{RATE}))", "requests"),
                    Query(f"sum(rate(headrace_rows_total{{{M}}}{RATE}))", "rows"),
                    Query(f"sum(headrace_capacity_rows_per_second{{{M}}})", "rows that it could do")], "ops"),
                Panel("Queue", [
                    Query(f"sum(headrace_queue_depth{{{M}}})", "in the queue"),
                    Query(f"sum(headrace_in_flight{{{M}}})", "in flight")]),
                Panel("Predicted wait", [
                    Query(f"max by (level) (headrace_predicted_wait_seconds{{{M}}})", "level {{level}}"),
                    Query(f"max(headrace_drain_seconds{{{M}}})", "until all is done")], "s",
                    "Of a new request of one row, by priority level."),
                Panel("Refused and failed", [
                    Query(f"sum by (reason) (rate(headrace_failures_total{{{M}}}{RATE}))", "{{reason}}")], "reqps", stacked=True),
                Panel("Late or unserved", [
                    Query(f"headrace:bad:ratio_rate5m{{{M}}}", "5 min"),
                    Query(f"headrace:bad:ratio_rate1h{{{M}}}", "1 h"),
                    Query(f"headrace:bad:ratio_rate6h{{{M}}}", "6 h")], "percentunit", "The budget is 1 %."),
                Panel("Late answers", [Query(f"sum(rate(headrace_late_total{{{M}}}{RATE}))", "late")], "reqps",
                      "Answered after the objective, or after the deadline of the request."),
            ],
        ),
        Row(
            "Canary and shadow versions",
            [
                Panel("Shares", [Query(f"headrace_traffic_share{{{M}}}", "{{model}} {{version}}")], "percentunit",
                      "Of the requests that name no version.", most=1),
                Panel("Requests by share", [
                    Query(f"sum by (model, version) (rate(headrace_traffic_routed_total{{{M}}}{RATE}))",
                          "{{model}} {{version}}")], "reqps", stacked=True),
                Panel("Undone canaries", [
                    Query(f"sum by (model, version, rule) (increase(headrace_traffic_undone_total{{{M}}}[1h])) > 0 or vector(0)",
                          "{{model}} {{version}} {{rule}}")], description="In the last hour, by the rule that took the share."),
                Panel("States of versions", [Query(f"headrace_traffic_state{{{M}}} == 1")], kind="table"),
                Panel("Shadow requests", [
                    Query(f"sum by (model, version, outcome) (rate(headrace_shadow_requests_total{{{M}}}{RATE}))",
                          "{{model}} {{version}} {{outcome}}")], "reqps", stacked=True),
                Panel("Agreement of shadow answers", [
                    Query(f"sum by (model, version) (rate(headrace_shadow_agreeing_rows_total{{{M}}}{RATE})) / "
                          f"sum by (model, version) (rate(headrace_shadow_rows_total{{{M}}}{RATE}))",
                          "{{model}} {{version}}")], "percentunit", "Share of rows that agree with the stable version."),
                Panel("Largest difference of shadow answers", [
                    Query(f"headrace_shadow_max_difference{{{M}}}", "{{model}} {{version}}")],
                      description="Absolute, of any output since the version was loaded."),
            ],
        ),
        Row(
            "Life",
            [
                Panel("Instances", [
                    Query(f"sum(headrace_instances{{{M}}})", "alive"),
                    Query(f"sum(headrace_instances_wanted{{{M}}})", "configured")]),
                Panel("Busy", [Query(f"headrace:busy:ratio_rate5m{{{M}}}", "{{job}}")], "percentunit", most=1),
                Panel("Versions", [
                    Query(f"sum by (version) (rate(headrace_requests_total{{{M}}}{RATE}))", "version {{version}}")], "reqps"),
                Panel("Loads", [
                    Query(f"sum by (result) (increase(headrace_model_loads_total{{{M}}}{RATE}))", "{{result}}")]),
                Panel("Time to load", [
                    Query(f"max by (version) (headrace_load_seconds_sum{{{M}}} / headrace_load_seconds_count{{{M}}})",
                          "version {{version}}")], "s"),
                Panel("Evicted and loaded on demand", [
                    Query(f"sum(increase(headrace_evictions_total{{{M}}}[1h]))", "evicted"),
                    Query(f"sum(increase(headrace_on_demand_loads_total{{{M}}}[1h]))", "loaded on demand")],
                    description="In the last hour, in favour of other models."),
            ],
        ),
    ],
    {"model": 'label_values(headrace_requests_total{job=~"$job"}, model)'},
)  # fmt: skip

GPU = Dashboard(
    "headrace-gpus",
    "Headrace / GPUs",
    "Values of the driver, and memory by model.",
    [
        Row(
            "Now",
            [
                Panel("GPUs", [Query(f"headrace_gpu_info{{{J}}}")], kind="table", width=16, height=6),
                Panel("Answer", [Query(f"headrace_gpu_up{{{J}}}", "{{instance}} GPU {{gpu}}")], kind="stat", width=8, height=6,
                      steps=((None, "red"), (1, "green"))),
            ],
        ),
        Row(
            "Work",
            [
                Panel("Utilisation", [Query(f"headrace_gpu_utilization_ratio{{{J}}}", "{{instance}} GPU {{gpu}}")], "percentunit",
                      "Share of the time in which any kernel ran: 100 % does not mean that the GPU is full.", most=1),
                Panel("Power", [
                    Query(f"headrace_gpu_power_watts{{{J}}}", "{{instance}} GPU {{gpu}}"),
                    Query(f"headrace_gpu_power_limit_watts{{{J}}}", "{{instance}} GPU {{gpu}} limit")], "watt"),
                Panel("Rows a joule", [Query(
                    f"sum(rate(headrace_rows_total{{{J}}}{RATE})) / sum(headrace_gpu_power_watts{{{J}}})", "rows/J")],
                    description="Of all models on all GPUs."),
                Panel("Clocks", [Query(f"headrace_gpu_clock_hertz{{{J}}}", "{{instance}} GPU {{gpu}} {{clock}}")], "hertz"),
                Panel("Temperature", [Query(f"headrace_gpu_temperature_celsius{{{J}}}", "{{instance}} GPU {{gpu}}")], "celsius"),
                Panel("Slowed down", [Query(f"headrace_gpu_slowed{{{J}}}", "{{instance}} GPU {{gpu}} {{reason}}")], most=1,
                      description="power_cap is usual under full load; thermal and hardware are not."),
            ],
        ),
        Row(
            "Memory",
            [
                Panel("In use, all processes", [
                    Query(f"headrace_gpu_device_memory_used_bytes{{{J}}}", "{{instance}} GPU {{gpu}}"),
                    Query(f"headrace_gpu_device_memory_total_bytes{{{J}}}", "{{instance}} GPU {{gpu}} all of it")], "bytes"),
                Panel("Reserved, by model", [
                    Query(f'sum by (gpu, model) (headrace_gpu_memory_bytes{{{J},gpu!="host"}})', "GPU {{gpu}} {{model}}")],
                    "bytes", stacked=True),
                Panel("Reserved share of the limit", [Query(
                    f'sum by (instance, gpu) (headrace_gpu_memory_bytes{{{J},gpu!="host"}}) '
                    f"/ sum by (instance, gpu) (headrace_gpu_memory_limit_bytes{{{J}}})", "{{instance}} GPU {{gpu}}")],
                    "percentunit", "--gpu-memory-fraction of each GPU; beyond it models are evicted.", most=1),
                Panel("Reserved, by kind", [
                    Query(f"sum by (gpu, kind) (headrace_gpu_memory_bytes{{{J}}})", "{{gpu}} {{kind}}")], "bytes", stacked=True),
                Panel("Evicted and loaded on demand", [
                    Query(f"sum by (model) (increase(headrace_evictions_total{{{J}}}[10m]))", "{{model}} evicted"),
                    Query(f"sum by (model) (increase(headrace_on_demand_loads_total{{{J}}}[10m]))", "{{model}} loaded")],
                    description="In ten minutes."),
                Panel("Memory errors", [
                    Query(f"headrace_gpu_ecc_errors_total{{{J}}}", "{{instance}} GPU {{gpu}} {{kind}}")],
                    description="Since the driver was loaded. Corrected ones are harmless, uncorrected ones corrupt responses."),
                Panel("Energy, an hour", [
                    Query(f"increase(headrace_gpu_energy_joules_total{{{J}}}[1h])", "{{instance}} GPU {{gpu}}")], "joule"),
            ],
        ),
    ],
)  # fmt: skip

CAPACITY = Dashboard(
    "headrace-capacity",
    "Headrace / Capacity",
    "Free capacity, and the resource that runs out first.",
    [
        Row(
            "Headroom",
            [
                Panel("Used share of the capacity", [Query(
                    f"headrace:rows:rate5m{{{M}}} / (sum by (job, model) (headrace_capacity_rows_per_second{{{M}}}) > 0)",
                    "{{model}}")], "percentunit", "Rows a second over the capacity of all instances.", "bargauge",
                    width=12, most=1, steps=((None, "green"), (0.6, "orange"), (0.8, "red"))),
                Panel("Busy", [Query(f"headrace:busy:ratio_rate5m{{{M}}}", "{{model}}")], "percentunit",
                      "Share of the time in which instances run batches.", "bargauge", width=12, most=1,
                      steps=((None, "green"), (0.6, "orange"), (0.8, "red"))),
                Panel("Rows a second", [
                    Query(f"headrace:rows:rate5m{{{M}}}", "{{model}}"),
                    Query(f"sum by (job, model) (headrace_capacity_rows_per_second{{{M}}})", "{{model}} at most")], "ops",
                    width=12),
                Panel("Replicas needed", [Query(
                    f"ceil(headrace:rows:rate5m{{{M}}} / 0.7"
                    f" / (avg by (job, model) (headrace_capacity_rows_per_second{{{M}}}) > 0))", "{{model}}")],
                    description="To run each at no more than 70 % of its capacity.", width=12),
            ],
        ),
        Row(
            "Trend",
            [
                Panel("Requests, with trend", [
                    Query(f"headrace:requests:rate5m{{{M}}}", "{{model}}"),
                    Query(f"clamp_min(predict_linear(headrace:requests:rate5m{{{M}}}[6h], 86400), 0)", "{{model}} in a day")],
                    "reqps", "Linear through the last six hours; daily cycles are not considered.", width=12),
                Panel("Time to complete requests", [Query(f"max by (model) (headrace_drain_seconds{{{M}}})", "{{model}}")], "s",
                      "Without new requests.", width=12),
            ],
        ),
        Row(
            "Bottlenecks",
            [
                Panel("Refused for lack of capacity", [Query(
                    f'sum by (model) (rate(headrace_failures_total{{{M},reason=~"overloaded|would_miss|queue_timeout"}}{RATE}))',
                    "{{model}}")], "reqps"),
                Panel("Refused by quota", [
                    Query(f'sum by (model) (rate(headrace_failures_total{{{M},reason="quota"}}{RATE}))', "{{model}}")], "reqps"),
                Panel("Rows a batch", [Query(f"headrace:batch_rows:mean5m{{{M}}}", "{{model}}")],
                      description="Larger batches raise the capacity at no cost."),
                Panel("CPU", [Query(f"rate(process_cpu_seconds_total{{{J}}}{RATE})", "{{instance}}")], "short", "Cores in use."),
                Panel("Event loop lag, p99", [Query(f"headrace:event_loop_lag_seconds:p99_5m{{{J}}}", "{{instance}}")], "s"),
                Panel("Memory", [Query(f"process_resident_memory_bytes{{{J}}}", "{{instance}}")], "bytes"),
            ],
        ),
    ],
    {"model": 'label_values(headrace_requests_total{job=~"$job"}, model)'},
    frozenset({"model"}),
)  # fmt: skip

DASHBOARDS = (OVERVIEW, MODEL, GPU, CAPACITY)


def files() -> dict[str, str]:
    """Name and content of every file."""
    return {f"{one.uid}.json": json.dumps(one.to_json(), indent=1, ensure_ascii=False) + "\n" for one in DASHBOARDS}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, content in files().items():
        (FOLDER / name).write_text(content, encoding="utf-8")
