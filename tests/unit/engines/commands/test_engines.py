from __future__ import annotations

import argparse
import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from headrace.config.digests import config_digest
from headrace.config.machine import Machine, onnxruntime_machine
from headrace.config.manifest import STAMP_FILE, read_stamps, write_stamp
from headrace_engines.commands import engines as store_survey
from headrace_engines.commands import engines as storing
from headrace_engines.errors import BuildError
from headrace_engines.project import open_project
from headrace_engines.store import ENTRY_FILE, Store, StoreEntry, publish
from rich.console import Console

from tests.support.engine_projects import stamp_of
from tests.support.models import affine

HERE = onnxruntime_machine()
ELSEWHERE = replace(HERE, capability="neon")
DAY_S = 86_400


class _Place:
    """A store and a repository, and the commands on them."""

    def __init__(self, root: Path) -> None:
        self.store = Store(root / "cache")
        self.repository = root / "repository"
        self.repository.mkdir()

    def add_model(self, name: str) -> Path:
        folder = self.repository / name / "1"
        folder.mkdir(parents=True)
        onnx.save_model(affine(), folder / "model.onnx")
        return folder

    def add_entry(self, name: str, machine: Machine = HERE, size_bytes: int = 5000) -> StoreEntry:
        key = self.store.key({"name": name, "machine": str(machine)})
        facts = {"model": name, "precision": "int8", "machine": {"target": machine.target, "device": machine.device}}
        with self.store.building(key), self.store.scratch() as scratch:
            (scratch / "x.onnx").write_bytes(bytes(size_bytes))
            return self.store.add(key, scratch / "x.onnx", facts)

    def publish(self, name: str, machine: Machine = HERE, **changes: Any) -> StoreEntry:
        entry = self.add_entry(name, machine)
        project = open_project(name, self.repository)
        stamp = stamp_of(entry, machine, (project.digest(), config_digest(project.config)))
        accuracy = {"top1_agreement": 0.9876, "accuracy": None}
        publish(entry.path, project.source.parent, replace(stamp, accuracy=accuracy, **changes))
        return entry

    def run(self, action: str, *words: str, repositories: bool = True, width: int = 200) -> tuple[int, str]:
        parser = argparse.ArgumentParser()
        storing.add_arguments(parser, action)
        given = ["--model-repository", str(self.repository)] if repositories else []
        output = io.StringIO()
        options = parser.parse_args([*given, "--cache", str(self.store.root), *words])
        status = storing.run(options, Console(file=output, width=width, force_terminal=False))
        return status, output.getvalue()

    def json(self, action: str, *words: str) -> Any:
        return json.loads(self.run(action, "--json", *words)[1])


@pytest.fixture
def place(tmp_path: Path) -> _Place:
    return _Place(tmp_path)


def _age(entry: StoreEntry, days: float) -> None:
    path = entry.path.with_name(ENTRY_FILE)
    moment_s = path.stat().st_mtime - days * DAY_S
    os.utime(path, (moment_s, moment_s))


def _change(path: Path) -> None:
    """Another byte, the same size."""
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _reconfigure(place: _Place, name: str) -> None:
    (place.repository / name / "config.yaml").write_text("max_batch_size: 32\n")


# ls


def test_an_empty_store_lists_nothing(place: _Place) -> None:
    status, text = place.run("ls")
    assert status == 0
    assert f"The store {place.store.root} is empty" in text
    assert "headrace build MODEL" in text
    assert not place.store.root.exists()


def test_entries_and_what_is_published_are_listed(place: _Place) -> None:
    for name in ("here", "there", "stale", "other", "broken"):
        place.add_model(name)
    place.publish("here", forced=True, overridden=True)
    place.publish("there", ELSEWHERE)
    place.publish("stale")
    _reconfigure(place, "stale")
    place.publish("other")
    onnx.save_model(affine(seed=1), place.repository / "other" / "1" / "model.onnx")
    place.publish("broken")
    (place.repository / "broken" / "1" / STAMP_FILE).write_text("{")
    unused = place.add_entry("unused")
    document = place.json("ls")
    result = {one["model"]: (one["state"], one["problem"]) for one in document["published"]}
    assert result["here"] == ("used", None)
    assert result["there"] == ("foreign", f"for {ELSEWHERE}")
    assert result["stale"] == ("stale", "built for another configuration (precision int8)")
    assert result["other"] == ("stale", "built from another model.onnx")
    assert result["broken"][0] == "damaged"
    published = {one["facts"]["model"]: one["published"] for one in document["store"]["entries"]}
    assert published["here"] == ["here/1"]
    assert published["unused"] == []
    status, text = place.run("ls")
    assert status == 0
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "forced" in lines["here/1"]
    assert "98.8%" in lines["here/1"]
    assert "none" in lines[unused.key[:12]]
    assert "6 in all, 30.0 kB" in text


def test_names_are_whole_and_problems_are_sentences_on_eighty_columns(place: _Place) -> None:
    for name in ("efficientnet_lite0", "m"):
        place.add_model(name)
        place.publish(name, forced=True, overridden=True)
    _reconfigure(place, "m")
    text = place.run("ls", width=80)[1]
    lines = text.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    assert sum("efficientnet_lite0" in line for line in lines) == 2
    assert sum("efficientnet_lite0/1" in line for line in lines) == 2
    assert lines[-1] == "m/1 stale: built for another configuration (precision int8)"


def test_a_model_whose_configuration_is_wrong_is_stale_for_that_reason(place: _Place) -> None:
    place.add_model("m")
    place.publish("m")
    (place.repository / "m" / "config.yaml").write_text("max_batch_sise: 32\n")
    (result,) = place.json("ls")["published"]
    assert result["state"] == "stale"
    assert "max_batch_sise" in result["problem"]


def test_tensorrt_is_loaded_only_for_its_engines(place: _Place, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Machine("tensorrt", "10.6.0", "NVIDIA H200", "9.0", 550)
    calls: list[int] = []
    monkeypatch.setattr(store_survey, "_tensorrt_machine", lambda: calls.append(1) or gpu)
    place.add_model("m")
    place.publish("m")
    place.json("ls")
    assert calls == []
    place.publish("m", gpu)
    place.publish("m", replace(gpu, capability="8.0"))
    assert [one["state"] for one in place.json("ls")["published"]] == ["used", "used", "foreign"]
    assert calls == [1]


def test_non_finite_numbers_are_printed_as_null(place: _Place) -> None:
    key = place.store.key({"a": 1})
    with place.store.scratch() as scratch:
        (scratch / "x.plan").write_bytes(b"x")
        place.store.add(key, scratch / "x.plan", {"accuracy": {"max_abs": float("inf"), "cosine": float("nan")}})
    (entry,) = place.json("ls")["store"]["entries"]
    assert entry["facts"]["accuracy"] == {"max_abs": None, "cosine": None}


def test_several_repositories_are_listed_and_a_missing_one_is_reported(place: _Place, tmp_path: Path) -> None:
    place.add_model("m")
    place.publish("m")
    second = tmp_path / "second"
    (second / "n" / "1").mkdir(parents=True)
    document = json.loads(place.run("ls", "--model-repository", str(second), "--json")[1])
    assert [one["model"] for one in document["published"]] == ["m"]
    with pytest.raises(BuildError, match="--model-repository"):
        place.run("ls", "--model-repository", str(tmp_path / "third"))


# gc


def test_gc_removes_old_unpublished_entries(place: _Place) -> None:
    place.add_model("m")
    published, old, young = place.publish("m"), place.add_entry("old"), place.add_entry("young")
    for entry, days in ((published, 40), (old, 40), (young, 20)):
        _age(entry, days)
    before = place.json("gc", "--dry-run")
    assert [one["key"] for one in before["removed"]] == [old.key]
    assert len(place.store.keys()) == 3
    after = place.json("gc")
    assert {**after, "dry_run": True} == before
    assert after["freed_bytes"] == after["removed"][0]["freed_bytes"] > 5000
    assert place.store.keys() == sorted([published.key, young.key])
    status, text = place.run("gc", "--keep-days", "10")
    assert status == 0
    assert f"removed {young.key[:12]} young" in text
    assert "1 of 2 engines removed" in text


def test_using_an_engine_keeps_it(place: _Place) -> None:
    entry = place.add_entry("old")
    _age(entry, 40)
    assert place.store.find(entry.key) is not None
    assert place.json("gc")["removed"] == []


def test_gc_all_removes_everything_but_published_entries(place: _Place) -> None:
    folder = place.add_model("m")
    entry = place.publish("m")
    (place.store.tables / "a.json").write_bytes(bytes(100))
    place.store.timing_cache(HERE).write_bytes(bytes(10))
    document = place.json("gc", "--all")
    assert len(document["files"]) == 2
    # The artefact itself is in the repository, too: removing one of its names gives nothing back.
    assert 110 < document["freed_bytes"] < 5000
    assert place.store.keys() == []
    assert not list(place.store.root.rglob("*.json"))
    assert (folder / entry.path.name).stat().st_size == 5000
    assert [one["state"] for one in place.json("ls")["published"]] == ["used"]


def test_gc_skips_entries_being_built(place: _Place) -> None:
    entry = place.add_entry("m")
    with place.store.building(entry.key), place.store.scratch() as scratch:
        (scratch / "half").write_bytes(b"x")
        document = place.json("gc", "--all")
        assert (scratch / "half").exists()
        assert f"kept {entry.key[:12]}: it is being built" in place.run("gc", "--all")[1]
    assert document["busy"] == [entry.key]
    assert document["removed"] == []
    assert place.store.find(entry.key) is not None


def test_gc_removes_damaged_entries_and_files_of_dead_builders(place: _Place) -> None:
    entry, good = place.add_entry("m"), place.add_entry("n")
    entry.path.with_name(ENTRY_FILE).write_text("{")
    dead = place.store.root / "scratch" / "0123"
    dead.mkdir()
    (dead / "half").write_bytes(b"x")
    dead.with_suffix(".lock").touch()
    assert [one["model"] for one in place.json("gc")["removed"]] == ["(damaged)"]
    assert place.store.keys() == [good.key]
    assert list((place.store.root / "scratch").iterdir()) == []


@pytest.mark.parametrize("days", ["-1", "nan", "x", "1e9"])
def test_days_that_are_none_are_refused(place: _Place, days: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        place.run("gc", f"--keep-days={days}")
    assert "--keep-days" in capsys.readouterr().err


# verify


def test_unchanged_entries_verify(place: _Place) -> None:
    place.add_model("m")
    place.publish("m")
    place.publish("m", ELSEWHERE)
    status, text = place.run("verify")
    assert (status, text.strip()) == (0, "4 checked, 4 as built, 0 wrong")
    assert place.json("verify") == {"checked": 4, "wrong": []}


def test_a_corrupted_artefact_is_detected_in_store_and_repository(place: _Place) -> None:
    folder = place.add_model("m")
    entry = place.publish("m")
    _change(folder / entry.path.name)
    status, text = place.run("verify")
    assert status == 1
    first, second, last = text.strip().splitlines()
    assert first.startswith(f"store {entry.key[:12]}: {entry.path.name} has been changed")
    assert second.startswith(f"m/1: {entry.path.name} has been changed")
    assert "headrace build m" in first
    assert "headrace build m --version 1" in second
    assert last == "2 checked, 0 as built, 2 wrong"
    # The store looks at size alone when it only lists.
    assert place.run("ls")[0] == 0


def test_the_remedy_names_the_requested_precision(place: _Place) -> None:
    place.add_model("m")
    entry = place.publish("m", overridden=True)
    _reconfigure(place, "m")
    assert "(`headrace build m --version 1 --precision int8` on " in place.run("verify")[1]
    _change(entry.path)
    assert "`headrace build m --precision int8` builds it again" in place.run("verify")[1]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda folder: _change(folder / "model.onnx"), "another model.onnx|cannot be built"),
        (lambda folder: (folder.parent / "config.yaml").write_text("max_batch_size: 32\n"), "another configuration"),
        (lambda folder: (folder / STAMP_FILE).write_text('{"format": 9}'), "format 9"),
        (lambda folder: (folder / STAMP_FILE).unlink(), "no stamp names model"),
        (lambda folder: (folder / "model.onnx").unlink(), "missing"),
        (lambda folder: (folder / read_stamps(folder)[0].artefact).unlink(), "is missing"),
    ],
)
def test_faults_of_a_version_are_reported_with_a_remedy(place: _Place, change: Any, problem: str) -> None:
    folder = place.add_model("m")
    place.publish("m")
    change(folder)
    assert place.run("verify")[0] == 1
    document = place.json("verify")
    assert document["wrong"]
    for one in document["wrong"]:
        assert one["where"] == "m/1"
        assert re.search(problem, one["problem"])
        assert "headrace build m" in one["cure"]


def test_a_stale_engine_for_another_machine_is_to_be_built_there(place: _Place) -> None:
    place.add_model("m")
    place.publish("m", ELSEWHERE)
    _reconfigure(place, "m")
    (wrong,) = place.json("verify")["wrong"]
    assert wrong["cure"].endswith("on cpu neon")


def test_odd_folders_in_a_repository_are_skipped(place: _Place) -> None:
    (place.repository / "file").write_text("")
    (place.repository / ".hidden" / "1").mkdir(parents=True)
    (place.repository / "empty").mkdir()
    (place.repository / "m" / "²").mkdir(parents=True)
    (place.repository / "m" / "3").write_text("")
    (place.repository / "demo" / "1").mkdir(parents=True)
    (place.repository / "demo" / "1" / STAMP_FILE).write_text('{"recipe": "a"}')
    assert place.json("verify") == {"checked": 0, "wrong": []}


def test_markup_in_names_is_text(place: _Place) -> None:
    place.add_model("m")
    place.publish("m", replace(HERE, device="[red]gpu[/]"))
    assert "[red]gpu[/]" in place.run("ls")[1]
    folder = place.repository / "m" / "1"
    (stamp,) = read_stamps(folder)
    (folder / stamp.artefact).unlink()
    write_stamp(folder, stamp)
    assert "[red]gpu[/]" in place.run("verify")[1]


def test_without_a_repository_of_the_usual_name_none_counts(
    place: _Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.add_model("m")
    place.publish("m")
    monkeypatch.chdir(tmp_path)
    assert json.loads(place.run("ls", "--json", repositories=False)[1])["published"] == []
    place.repository.rename(tmp_path / "model_repository")
    assert len(json.loads(place.run("ls", "--json", repositories=False)[1])["published"]) == 1
