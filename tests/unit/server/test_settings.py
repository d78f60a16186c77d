"""The command line and the environment."""

from __future__ import annotations

import argparse
import dataclasses
import os
import pwd
import stat
import tempfile
from pathlib import Path

import headrace
import pytest
from headrace.__main__ import ENGINES_COMMANDS, main
from headrace.core.cache_options import CacheOptions, RedisOptions, RedisTls
from headrace.core.limits import LIMIT_HELP, Limits
from headrace.core.telemetry import TritonMetrics
from headrace.server import settings
from headrace.server.settings import Settings
from headrace_engines.__main__ import main as engines_main

from tests.support.onnx_models import write_model


def parse(*arguments: str, **environ: str) -> Settings:
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser, environ)
    return settings.from_arguments(parser.parse_args(arguments))


def test_defaults() -> None:
    assert parse() == Settings(model_repository=(Path("model_repository"),), front_ends=settings.AUTO)
    assert Settings(model_repository=()).front_ends == 0, "servers in a program of their users are one process"


# Text of an option or a variable, and the value of its field.
VALUES = {
    "model_repository": ("a", (Path("a"),)),
    "host": ("0.0.0.0", "0.0.0.0"),
    "http_port": ("1", 1),
    "grpc_port": ("2", 2),
    "metrics_port": ("3", 3),
    "model_control": ("poll", "poll"),
    "load_model": ("m", ("m",)),
    "strict": ("1", True),
    "ready_when": ("all", "all"),
    "allow_client_shm": ("true", True),
    "model_name": ("digits", "digits"),
    "orca": ("always", "always"),
    "id": ("triton", "triton"),
    "allow_model_override": ("yes", True),
    "allow_python_uploads": ("yes", True),
    "trace_file": ("t.json", "t.json"),
    "log_format": ("json", "json"),
    "client_header": ("X-Api-Key", "x-api-key"),
    "http_header_forward_pattern": ("x-.*", "x-.*"),
    "grpc_header_forward_pattern": ("y", "y"),
    "gpu_memory_fraction": ("0.25", 0.25),
    "host_memory_budget": ("2MiB", 2 << 20),
    "profile_s": ("0", 0.0),
    "trial_limit_s": ("7.5", 7.5),
    "model_load_thread_count": ("2", 2),
    "inline_bound_us": ("0", 0),
    "state_dir": ("s", "s"),
    "environments_dir": ("e", "e"),
    "model_keys_file": ("team.pub", "team.pub"),
    "drain_timeout_s": ("6.5", 6.5),
    "keep_alive_timeout_s": ("7.5", 7.5),
    "stream_heartbeat_s": ("2.5", 2.5),
    "metrics": ("off", False),
    "metrics_config": ("summary_latencies=false", TritonMetrics(summary_latencies=False)),
    "grpc": ("off", False),
    "poll_interval_s": ("0.5", 0.5),
    "tls_cert": ("c.pem", "c.pem"),
    "tls_key": ("k.pem", "k.pem"),
    "tls_client_ca": ("a.pem", "a.pem"),
    "api_keys_file": ("keys.yaml", "keys.yaml"),
    "insecure_control": ("on", True),
    "allowed_host": ("inference.example", ("inference.example",)),
    "cors_origin": ("https://app.example", ("https://app.example",)),
    "jwks": ("https://id.example/jwks", "https://id.example/jwks"),
    "jwt_issuer": ("https://id.example", "https://id.example"),
    "jwt_audience": ("headrace", "headrace"),
    "cache_config": ("local,size=1MiB", CacheOptions(1 << 20)),
    "front_ends": ("4", 4),
    "repository_cache_dir": ("cache", "cache"),
    "repository_cache_bytes": ("1000", 1000),
    "hang_timeout_s": ("2.5", 2.5),
    "grpc_max_connection_age_s": ("60", 60.0),
}


def test_every_field_has_an_option_and_a_variable() -> None:
    assert set(VALUES) == {field.name for field in dataclasses.fields(Settings)} - {
        "limits",
        "telemetry",
        "front_ends_reason",
        "stores",
    }
    for name, (text, expected) in VALUES.items():
        variable = {f"HEADRACE_{name.upper()}": text}
        assert getattr(parse(**variable), name) == expected
        option = "--" + name.replace("_", "-")
        line = [option, text]
        if isinstance(expected, bool):
            line = [option if expected else option.replace("--", "--no-", 1)]
        assert getattr(parse(*line), name) == expected


@pytest.mark.parametrize("value", ["fast", "grpcio", ""])
def test_the_variable_of_a_removed_option_is_refused(value: str) -> None:
    text = f"HEADRACE_GRPC_ENGINE={value}: .* is gone: there is one gRPC server, Headrace's own; unset it"
    with pytest.raises(ValueError, match=text):
        parse(HEADRACE_GRPC_ENGINE=value)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("otlp_endpoint", "http://h:4317", "http://h:4317"),
        ("otlp_protocol", "http", "http"),
        ("trace_rate", "0", 0),
        ("request_log", "all", "all"),
        ("request_log_file", "r.jsonl", "r.jsonl"),
    ],
)
def test_request_logging_has_options_and_variables(name: str, text: str, value: object) -> None:
    assert getattr(parse(f"--{name.replace('_', '-')}", text).telemetry, name) == value
    assert getattr(parse(**{f"HEADRACE_{name.upper()}": text}).telemetry, name) == value


def test_metrics_are_configured_by_tritons_words() -> None:
    words = ("counter_latencies=false", "histogram_latencies=true", "summary_quantiles=0.99:0.001,0.5:0.05")
    expected = TritonMetrics(counter_latencies=False, summary_quantiles=(0.5, 0.99))
    assert parse(*(word for text in words for word in ("--metrics-config", text))).metrics_config == expected
    assert parse(HEADRACE_METRICS_CONFIG=" ".join(words)).metrics_config == expected


def test_the_response_cache_is_configured_by_tritons_words() -> None:
    assert parse("--cache-config=local,size=1048576").cache_config == CacheOptions(1 << 20)
    assert parse("--cache-config", "local,size=1", "--cache-config", "local,size=2GiB").cache_config == CacheOptions(
        2 << 30
    )
    assert parse(HEADRACE_CACHE_CONFIG="local,size=64MiB").cache_config == CacheOptions(64 << 20)
    assert parse().cache_config is None


def test_redis_is_configured_by_tritons_words() -> None:
    words = (
        "redis,host=cache",
        "redis,port=6380",
        "redis,user=me,password=word",
        "redis,db=0,connect_timeout=0,pool_size=4",
    )
    options = parse(*(word for text in words for word in ("--cache-config", text))).cache_config
    assert options == CacheOptions(0, RedisOptions("cache", 6380, "me", "word"))
    assert "word" not in repr(options)
    timeouts = "redis,host=cache,wait_timeout=3,socket_timeout=50,connect_timeout=200"
    assert parse("--cache-config=redis,port=1").cache_config == CacheOptions(0, RedisOptions("", 1)), (
        "refused at the start"
    )
    both = parse("--cache-config", timeouts, "--cache-config", "local,size=1KiB").cache_config
    expected = RedisOptions("cache", wait_timeout_ms=3, socket_timeout_ms=50, connect_timeout_ms=200)
    assert both == CacheOptions(1024, expected)
    environment = {"TRITONCACHE_REDIS_USERNAME": "me", "TRITONCACHE_REDIS_PASSWORD": "word"}
    options = parse("--cache-config", "redis,host=cache", **environment).cache_config
    assert options == CacheOptions(0, RedisOptions("cache", user="me", password="word"))


def test_the_passphrase_of_the_key_for_redis_comes_from_the_environment_too() -> None:
    option, environment = "redis,host=cache,cert=c.pem,key=c.key", {"HEADRACE_REDIS_KEY_PASSWORD": "open sesame"}
    expected = CacheOptions(
        0, RedisOptions("cache", tls=RedisTls(cert="c.pem", key="c.key", key_password="open sesame"))
    )
    assert parse("--cache-config", option, **environment).cache_config == expected
    options = parse(
        "--cache-config", f"{option},key_password=open sesame", HEADRACE_REDIS_KEY_PASSWORD="x"
    ).cache_config
    assert options == expected
    assert "sesame" not in repr(options)
    # Without a certificate it neither enables TLS nor is used.
    for words, tls in (("", None), (",tls=true", RedisTls())):
        options = parse("--cache-config", f"redis,host=cache{words}", **environment).cache_config
        assert options == CacheOptions(0, RedisOptions("cache", tls=tls))


@pytest.mark.parametrize(
    ("words", "tls"),
    [
        ("", None),
        (",tls=false", None),
        (",tls=true", RedisTls()),
        (",tls_enabled=TRUE", RedisTls()),
        (",ca=a.pem", RedisTls(ca="a.pem")),
        (",cacert=a.pem,cacert_dir=/a", RedisTls(ca="a.pem", ca_dir="/a")),
        (",cacert=a.pem,ca=b.pem", RedisTls(ca="b.pem")),
        (",cert=c.pem,key=c.key,sni=name", RedisTls(cert="c.pem", key="c.key", sni="name")),
        (",verify=0", RedisTls(verify=False)),
        (",tls=true,tls_enabled=false", None),
        (",tls=false,ca=a.pem", RedisTls(ca="a.pem", is_disabled=True)),
    ],
)
def test_tls_of_redis(words: str, tls: RedisTls | None) -> None:
    options = parse("--cache-config", f"redis,host=cache{words}").cache_config
    assert options == CacheOptions(0, RedisOptions("cache", tls=tls))
    # One setting a value, as in Triton.
    parts = ["host=cache", *words.split(",")[1:]]
    single = parse(*(word for part in parts for word in ("--cache-config", f"redis,{part}"))).cache_config
    assert single == options


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a cache: write local,size=BYTES"),
        ("disk,size=1", "'disk' is not a cache"),
        ("local", "is not a setting of the cache local: write local,size=BYTES"),
        ("local,length=1", "is not a setting of the cache local"),
        ("local,size=", "is not a setting of the cache local"),
        ("local,size=0", "'0' is not a size"),
        ("local,size=1.5GiB", "is not a size: write a number of bytes, or one with KiB, MiB or GiB"),
        ("local,size=-1", "is not a size"),
        ("redis", "'' is not a setting of the cache redis: write redis,host=NAME,port=NUMBER"),
        ("redis,hots=a", "'hots' is not a setting of the cache redis"),
        ("redis,host=a,size=1", "'size' is not a setting of the cache redis"),
        ("redis,port=70000", "'70000' is not a value of port: write a number from 1 to 65535"),
        ("redis,db=x", "'x' is not a value of db"),
        ("redis,tls=maybe", "'maybe' is not a value of tls: write true or false"),
        ("redis,tls_enabled=2", "'2' is not a value of tls_enabled: write true or false"),
        ("redis,verify=peer", "'peer' is not a value of verify: write true or false"),
        ("redis,ca=", "'ca' is not a setting of the cache redis"),
        ("local,ca=a.pem", "'ca' is not a setting of the cache local"),
        ("redis,password=one,two", "a part without = is not a setting of the cache redis"),
    ],
)
def test_a_wrong_setting_of_the_cache_is_answered(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--cache-config", text)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["", "summary_latencies", "summary_latencies=yes", "summaries=true", "summary_quantiles="]
)
def test_an_unknown_setting_of_metrics_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--metrics-config", text)
    assert "write preset=full|lean, counter_latencies=true|false" in capsys.readouterr().err
    if text:
        with pytest.raises(ValueError, match="HEADRACE_METRICS_CONFIG"):
            parse(HEADRACE_METRICS_CONFIG=text)


@pytest.mark.parametrize("quantiles", ["0", "1", "x", "0.5,,0.9", "0.5,0.5", "nan"])
def test_quantiles_are_between_0_and_1(quantiles: str) -> None:
    with pytest.raises(SystemExit):
        parse("--metrics-config", f"summary_quantiles={quantiles}")


@pytest.mark.parametrize("limit", LIMIT_HELP)
def test_every_limit_has_an_option_and_a_variable(limit: str) -> None:
    assert getattr(parse(f"--{limit.replace('_', '-')}", "7").limits, limit) == 7
    assert getattr(parse(**{f"HEADRACE_{limit.upper()}": "7"}).limits, limit) == 7


def test_fixed_limits_have_no_option() -> None:
    constants = {field.name for field in dataclasses.fields(Limits)} - set(LIMIT_HELP)
    assert constants == {"max_chunks", "max_json_depth", "max_json_keys", "max_unread_bytes", "slow_body_s"}
    for name in constants:
        with pytest.raises(SystemExit):
            parse(f"--{name.replace('_', '-')}", "7")
        assert parse(**{f"HEADRACE_{name.upper()}": "7"}).limits == Limits()


def test_the_command_line_wins_and_repositories_add_up() -> None:
    chosen = parse("--model-repository", "x", "--model-repository", "y", HEADRACE_MODEL_REPOSITORY="a:b")
    assert chosen.model_repository == (Path("x"), Path("y"))
    assert parse(HEADRACE_MODEL_REPOSITORY="a:b").model_repository == (Path("a"), Path("b"))


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("HTTP_PORT", "80a"),
        ("HTTP_PORT", "70000"),
        ("STRICT", "maybe"),
        ("MODEL_CONTROL", "auto"),
        ("CLIENT_HEADER", ""),
        ("CLIENT_HEADER", "x client"),
        ("CLIENT_HEADER", "grpc-timeout"),
        ("CLIENT_HEADER", "client-bin"),
        ("CLIENT_HEADER", "Content-Length"),
        ("CLIENT_HEADER", "X-Request-Timeout-Ms"),
        ("CLIENT_HEADER", "headrace-timing"),
        ("CLIENT_HEADER", "traceparent"),
        ("OTLP_PROTOCOL", "udp"),
        ("REQUEST_LOG", "some"),
        ("TRACE_RATE", "-1"),
        ("GPU_MEMORY_FRACTION", "0"),
        ("MAX_BODY_BYTES", "0"),
        ("MAX_STREAMS", "1e3"),
        ("HEADER_TIMEOUT_S", "0"),
        ("STALL_TIMEOUT_S", "soon"),
        ("GPU_MEMORY_FRACTION", "1.01"),
        ("GPU_MEMORY_FRACTION", "nan"),
        ("GPU_MEMORY_FRACTION", "half"),
    ],
)
def test_a_wrong_variable_is_named(variable: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"HEADRACE_{variable}"):
        parse(**{f"HEADRACE_{variable}": value})


def test_urls_and_folders_are_repositories_in_their_order() -> None:
    def locations(*words: str, **environ: str) -> list[str]:
        parser = argparse.ArgumentParser()
        settings.add_arguments(parser, environ)
        return [str(each) for each in settings.repository_locations(parser.parse_args(list(words)))]

    assert locations(HEADRACE_MODEL_REPOSITORY="a:s3://bucket/x:gs://other:b") == [
        "a",
        "s3://bucket/x",
        "gs://other",
        "b",
    ]
    assert locations("--model-repository", "az://account1/models", "--model-repository", "b") == [
        "az://account1/models",
        "b",
    ]
    assert locations("hf://org/net", "folder") == ["hf://org/net@main"]
    assert locations() == ["model_repository"]
    with pytest.raises(ValueError, match=r"HEADRACE_MODEL_REPOSITORY.*is not a store"):
        locations(HEADRACE_MODEL_REPOSITORY="a:s4://bucket")


@pytest.mark.parametrize(
    ("options", "folder"),
    [
        ({}, "~/.cache/headrace/state/repositories"),
        ({"state_dir": "state"}, "state/repositories"),
        ({"state_dir": ""}, ""),
        ({"state_dir": "", "repository_cache_dir": "cache"}, "cache"),
    ],
)
def test_the_cache_of_repositories_is_in_the_state_folder(options: dict[str, str], folder: str) -> None:
    assert settings.repository_cache(Settings(model_repository=(), **options)) == folder


NO_HOME = "~unknown-account/x"


@pytest.mark.parametrize(
    "name", ["state-dir", "environments-dir", "repository-cache-dir", "model-keys-file", "api-keys-file"]
)
def test_paths_in_a_home_that_does_not_exist_are_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(f"--{name}", NO_HOME)
    assert f"--{name}: '{NO_HOME}': ~unknown-account has no home folder here" in capsys.readouterr().err
    variable = f"HEADRACE_{name.upper().replace('-', '_')}"
    with pytest.raises(ValueError, match=f"{variable}: .*has no home folder here"):
        parse(**{variable: NO_HOME})


@pytest.mark.parametrize(
    "words",
    [
        ["validate", "--state-dir", NO_HOME, "folder"],
        ["environments", "list", "--environments-dir", NO_HOME],
        ["keys", "list", "--file", NO_HOME],
        ["build", "model", "--state-dir", NO_HOME],
        ["build", "model", "--cache", NO_HOME],
        ["engines", "ls", "--cache", NO_HOME],
        ["lab", "conv", "model", "--kernel-cache", NO_HOME],
    ],
)
def test_commands_refuse_a_home_that_does_not_exist(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    program = engines_main if words[0] in ENGINES_COMMANDS else main
    with pytest.raises(SystemExit, match="2"):
        program(words)
    assert "has no home folder here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["checksums", "verify", "--model-keys-file", NO_HOME, "{folder}"], "no home folder here"),
        (["checksums", "write", "--secret-key", NO_HOME, "{folder}"], "No such file"),
        (["import", "keras", NO_HOME, "--name", "m"], "there is no"),
        (["import", "savedmodel", NO_HOME, "--name", "m"], "there is no"),
    ],
)
def test_files_in_a_home_that_does_not_exist_are_missing(
    tmp_path: Path, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "m" / "1" / "model.onnx")
    try:
        program = engines_main if words[0] in ENGINES_COMMANDS else main
        status = program([word.format(folder=tmp_path) for word in words])
    except SystemExit as error:
        status = error.code
    output = capsys.readouterr()
    assert status in (1, 2), output
    assert text in output.out + output.err


@pytest.mark.parametrize("name", ["state_dir", "model_keys_file"])
def test_an_embedded_server_refuses_a_home_that_does_not_exist(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="has no home folder here"):
        headrace.Server(tmp_path, **{name: NO_HOME})
    with pytest.raises(ValueError, match="has no home folder here"):
        headrace.Server(NO_HOME)


@pytest.fixture
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of temporary files of a user without HOME and without an entry in passwd."""

    def getpwuid(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", getpwuid)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", "/")  # set again at the end
    monkeypatch.delenv("HOME")
    return tmp_path


@pytest.mark.parametrize("taken", ["", "folder", "link"])
def test_a_user_without_a_home_gets_a_private_folder(homeless: Path, taken: str) -> None:
    own = homeless / f"headrace-{os.geteuid()}"
    if taken == "folder":
        own.mkdir(0o777)
        own.chmod(0o777)
    if taken == "link":
        own.symlink_to(homeless)
    warning = settings.ensure_home()
    home = Path.home()
    assert (home == own) == (not taken)
    assert home.parent == homeless
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert f"files are kept in {home}, set HOME for another" in warning
    assert settings.ensure_home() == ""
    if not taken:  # the next server finds the state of this one
        del os.environ["HOME"]
        settings.ensure_home()
        assert Path.home() == own


def test_commands_run_without_a_home(homeless: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(homeless / "repository" / "m")
    assert main(["validate", "--load", str(homeless / "repository")]) == 0
    assert "this user has no home folder" in caplog.text
    assert Path.home().parent == homeless
