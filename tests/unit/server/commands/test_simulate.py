from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from headrace.__main__ import main
from headrace.inference.simulation.options import SettingParser, add_arguments
from onnx import TensorProto

from tests.support.chains import write_chain
from tests.support.onnx_models import identity_model, write_model
from tests.support.sequence_models import add_accumulator

QUICK = ("simulate", "--seconds", "2", "--rate", "500", "--profile", "450+20n")


def simulated(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main([*QUICK, "--json", *options]) == 0
    document = json.loads(capsys.readouterr().out)
    assert isinstance(document, dict)
    return document


def test_json_is_the_same_for_the_same_seed(capsys: pytest.CaptureFixture[str]) -> None:
    first, again, other = (simulated(capsys, "--variation", "0.3", "--seed", seed) for seed in ("1", "1", "2"))
    assert first == again
    assert first != other
    (setting,) = first["settings"]
    assert setting["all"]["requests"] == setting["all"]["answered"] == first["requests"]
    assert setting["all"]["latency_us"]["p50"] == pytest.approx(470, rel=0.5)


def test_settings_are_compared_on_the_same_requests(capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ("--scheduler", "fixed", "--delay-us", "5000", "--slo-ms", "3")
    document = simulated(capsys, *fixed, "--compare", "delay-us=0", "--compare", "slo-ms=9")
    given, prompt, lax = document["settings"]
    assert [each["setting"] for each in document["settings"]] == ["as given", "delay-us=0", "slo-ms=9"]
    assert given["all"]["requests"] == prompt["all"]["requests"] == lax["all"]["requests"]
    assert given["all"]["mean_batch"] > prompt["all"]["mean_batch"]
    assert given["all"]["goodput"] < prompt["all"]["goodput"]
    assert lax["all"]["latency_us"] == given["all"]["latency_us"], "what is not said is as given"
    assert lax["all"]["goodput"] > given["all"]["goodput"]


def test_policy_and_objective_are_the_configurations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = "max_batch_size: 4\ndynamic_batching: {max_queue_delay_microseconds: 20000}\nslo: {p99_ms: 30}\n"
    write_model(tmp_path / "calm", config=config)
    write_model(tmp_path / "plain")
    document = simulated(capsys, str(tmp_path / "calm"), str(tmp_path / "plain"), "--profile", "plain=100,1000+10n")
    calm, plain = document["settings"][0]["models"]
    assert (calm["name"], calm["slo_ms"], plain["name"], plain["slo_ms"]) == ("calm", 30, "plain", None)
    assert calm["mean_batch"] > 3
    assert set(calm["close_reasons"]) <= {"full", "delay"}
    assert plain["latency_us"]["p50"] == pytest.approx(100)


def test_batch_times_are_those_that_this_machine_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "measured")
    text = identity_model({"x": (TensorProto.STRING, ["batch", 2])}, {"y": (TensorProto.STRING, ["batch", 2])})
    write_model(tmp_path / "text", text)
    command = ["simulate", "--json", "--seconds", "1", "--rate", "20", "--state-dir", str(tmp_path / "state")]
    assert main([*command, str(tmp_path / "measured"), str(tmp_path / "text")]) == 0
    captured = capsys.readouterr()
    measured, invented = json.loads(captured.out)["settings"][0]["models"]
    assert 0 < measured["latency_us"]["p50"] < 1000, "no invented time"
    assert invented["latency_us"]["p50"] >= 1100
    assert "measured: batch times as measured on this machine, " in captured.err
    assert "text: batch times are not measured (" in captured.err
    assert list((tmp_path / "state" / "profiles").iterdir()), "the next run has nothing to measure"


def test_a_recorded_trace_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.csv").write_text("seconds,model\n0,model1\n0.0001,model1\n1,model0\n")
    document = simulated(capsys, "--arrivals", str(tmp_path / "t.csv"), "--models", "2")
    nought, one = document["settings"][0]["models"]
    assert (nought["requests"], one["requests"]) == (1, 2)
    assert one["latency_us"]["mean"] == pytest.approx((470 + 470 + 370) / 2)


def test_an_objective_refuses_requests_that_fixed_sizes_answer_too_late(capsys: pytest.CaptureFixture[str]) -> None:
    overloaded = ("--rate", "9000", "--profile", "1000+100n", "--slo-ms", "20")
    promise, fixed = simulated(capsys, *overloaded, "--compare", "scheduler=fixed")["settings"]
    assert promise["all"]["goodput"] > 0.9 * fixed["all"]["throughput"]
    assert fixed["all"]["goodput"] < 0.2 * fixed["all"]["throughput"]
    assert set(promise["all"]["errors"]) == {"would_miss"}


def test_latency_objectives_are_read_by_model(capsys: pytest.CaptureFixture[str]) -> None:
    (setting,) = simulated(capsys, "--models", "3", "--slo-ms", "model1=5,8")["settings"]
    assert [each["slo_ms"] for each in setting["models"]] == [8, 5, 8]


def test_clients_are_distinguished_and_have_quotas(capsys: pytest.CaptureFixture[str]) -> None:
    client_options = ("--clients", "calm:1,loud:9", "--quota", "loud=100:10")
    (setting,) = simulated(capsys, *client_options)["settings"]
    calm, loud = setting["clients"]
    assert (calm["name"], loud["name"]) == ("calm", "loud")
    assert calm["requests"] == calm["answered"]
    assert loud["answered"] == pytest.approx(2 * 100 + 10, abs=2)
    assert loud["errors"] == {"quota": loud["requests"] - loud["answered"]}


def test_levels_are_those_of_recorded_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.csv").write_text("seconds,priority\n0,2\n0.0001,2\n0.0002,1\n")
    document = simulated(capsys, "--arrivals", str(tmp_path / "t.csv"), "--levels", "2", "--max-batch-size", "1")
    assert document["settings"][0]["all"]["latency_us"]["p50"] == pytest.approx(2 * 470 - 200), (
        "the urgent one is second"
    )


def test_people_get_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--models", "12", "--skew", "1", "--slo-ms", "5"]) == 0
    out = capsys.readouterr().out
    assert "the 10 models of 12 with the most requests, and all" in out
    assert "model0 " in out
    assert "model11 " not in out
    assert "p99.9 ms" in out
    assert main([*QUICK, "--clients", "calm,loud"]) == 0
    assert "client calm" in capsys.readouterr().out
    assert main([*QUICK, "--compare", "instances=2"]) == 0
    out = capsys.readouterr().out
    assert "as given" in out
    assert "instances=2 " in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--profile", "quick"], "'quick' is not a latency profile"),
        (["--profile", "other=5"], "no model 'other' is simulated, only model0"),
        (["--arrivals", "tidal"], "--arrivals tidal: write poisson, bursty, diurnal"),
        (["--arrivals", "none.csv"], "none.csv"),
        (["--rate", "0.0001"], "the trace has no requests"),
        (["--warm-up", "2"], "--warm-up 2 leaves nothing to measure of 2 seconds"),
        (["--compare", "instances=none"], '--compare "instances=none": argument --instances'),
        (["--compare", "rate=5"], '--compare "rate=5": '),
        (["--compare", "instances 2"], '--compare "instances 2": '),
        (["nowhere"], "there is no model 'nowhere'"),
        (["--slo-ms", "other=5"], "--slo-ms other=...: no model 'other' is simulated"),
    ],
)
def test_unsupported_settings_are_errors(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, *options]) == 2
    stderr = " ".join(capsys.readouterr().err.split())
    assert message in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    "option",
    ["--rate=0", "--seconds=nan", "--rows=0", "--rows=1:0", "--swing=2", "--instances=0", "--delay-us=-1", "--quota=0"],
)
def test_options_out_of_range_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["simulate", option])
    assert option.split("=")[0] in capsys.readouterr().err


def test_lists_may_have_spaces() -> None:
    parser = SettingParser()
    add_arguments(parser)
    options = parser.parse_args(["--preferred", "4, 8", "--rows", "1, 8:2", "--quota", "a=5: 3"])
    assert (options.preferred, options.rows, options.quota) == ((4, 8), ((1, 1.0), (8, 2.0)), {"a": (5.0, 3)})


def test_an_invalid_model_folder_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "bad", config="max_batch_siz: 3\n")
    assert main([*QUICK, str(tmp_path / "bad")]) == 2
    assert "max_batch_siz" in capsys.readouterr().err


def test_a_model_with_sequences_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_accumulator(tmp_path, "sums")
    assert main([*QUICK, str(tmp_path / "sums")]) == 2
    assert "model 'sums' has sequence_batching: sequences are not simulated" in capsys.readouterr().err


def test_a_plot_shows_every_setting_and_the_objective(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulated(capsys, "--slo-ms", "3", "--compare", "scheduler=fixed", "--plot", str(tmp_path / "p.svg"))
    root = ElementTree.fromstring((tmp_path / "p.svg").read_text())
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"as given", "scheduler=fixed", "offered", "answered within", "answered in time"} <= set(texts)
    dashed = [each for each in root.iter("{http://www.w3.org/2000/svg}path") if each.get("stroke-dasharray") == "2 2"]
    assert len(dashed) == 1, "the SLO"


def test_a_pipeline_runs_through_the_queues_of_its_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_chain(tmp_path)
    command = ["simulate", str(tmp_path / "chain"), "--seconds", "4", "--timeout-ms", "40", "--json", "--rate"]
    profile = ["--profile", "first=500,second=4000,third=500"]
    assert main([*command, "4000", *profile]) == 0  # twice what the second step can
    (setting,) = json.loads(capsys.readouterr().out)["settings"]
    models = {each["name"]: each for each in setting["models"]}
    assert models["chain"]["throughput"] > 0.9 * 2000
    assert set(models["chain"]["errors"]) <= {"would_miss", "deadline"}
    assert models["chain"]["latency_us"]["p99.9"] <= 40_000
    assert models["second"]["requests"] == 0, "no request goes to it directly"
    assert models["second"]["mean_batch"] > 7
    (pipeline,) = setting["pipelines"]
    assert (pipeline["name"], pipeline["limiting_step"]) == ("chain", "second")
    assert pipeline["wasted"] < 0.05
    assert [(step["name"], step["model"]) for step in pipeline["steps"]] == [
        (n, n) for n in ("first", "second", "third")
    ]
    assert sum(step["requests"] for step in pipeline["steps"]) > 3 * 0.9 * 2000 * 4
    # Far below the capacity every request is answered, after the sum of its steps.
    assert main([*command, "20", *profile]) == 0
    (setting,) = json.loads(capsys.readouterr().out)["settings"]
    latency_us = setting["models"][-1]["latency_us"]
    assert latency_us["p50"] == pytest.approx(5000, abs=1)
    # The step that limits it follows the profile.
    assert main([*command[:-2], "--rate", "100", "--profile", "first=9000,second=10,third=10"]) == 0
    assert "step 'first' takes the longest" in capsys.readouterr().out


def test_yaml_pipelines_simulate_built_in_steps_and_fallbacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_chain(tmp_path)
    (tmp_path / "image/1").mkdir(parents=True)
    (tmp_path / "image/config.yaml").write_text(
        "input: [{name: x, data_type: fp32, dims: [16]}]\noutput: [{name: y, data_type: fp32, dims: [16]}]\n"
        "max_batch_size: 8\npipeline:\n  steps:\n"
        "    main: {model: first, fallback: second, inputs: {X: x}, outputs: {Y: m}}\n"
        "    shares: {builtin: softmax, inputs: {scores: m}, outputs: {probabilities: y}}\n"
    )
    command = ["simulate", str(tmp_path / "image"), "--json", "--seconds", "2", "--rate", "50", "--timeout-ms", "20"]
    assert main([*command, "--profile", "first=90000,second=500,image.shares=10"]) == 0
    (setting,) = json.loads(capsys.readouterr().out)["settings"]
    assert [each["name"] for each in setting["models"]] == ["first", "second", "image.shares", "image"]
    batches = {each["name"]: each["mean_batch"] for each in setting["models"]}
    assert setting["models"][-1]["answered"] == setting["models"][-1]["requests"], "the fallback is in time"
    assert batches["second"] is not None


def test_rows_of_a_pipeline_with_each_run_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_chain(tmp_path)
    (tmp_path / "crops/1").mkdir(parents=True)
    (tmp_path / "crops/config.yaml").write_text(
        "input: [{name: x, data_type: fp32, dims: [-1, 16]}]\noutput: [{name: y, data_type: fp32, dims: [-1, 16]}]\n"
        "max_batch_size: 8\npipeline:\n  steps:\n"
        "    detect: {model: first, inputs: {X: x}, outputs: {Y: m}}\n"
        "    classify: {model: second, each: m, inputs: {X: m}, outputs: {Y: y}}\n"
    )
    command = ["simulate", str(tmp_path / "crops"), "--json", "--seconds", "2", "--rate", "20", "--rows", "4:1"]
    assert main([*command, "--profile", "first=500,second=500"]) == 0
    (setting,) = json.loads(capsys.readouterr().out)["settings"]
    crops = setting["models"][-1]
    assert crops["answered"] == crops["requests"] > 20
    assert [step["requests"] for step in setting["pipelines"][0]["steps"]] == [4 * crops["requests"]] * 2


def test_a_pipeline_with_an_invalid_graph_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_chain(tmp_path)
    config = tmp_path / "chain/config.pbtxt"
    config.write_text(config.read_text().replace('value: "t1" } output_map', 'value: "lost" } output_map'))
    assert main(["simulate", str(tmp_path / "chain"), "--seconds", "1"]) == 2
    assert 'chain: output "Y" is never ready' in capsys.readouterr().err
