"""The dashboards are those that their Python says, and lie flat in Grafana's grid."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from headrace.observability.metrics_table import FAMILIES

from deploy.grafana.dashboards import FOLDER, files

# Fields of the data source, which the schema of dashboards does not contain.
OF_PROMETHEUS = re.compile(r"annotations\.list\.\d+\.(titleFormat|textFormat|target\.(refId|expr))$")
DASHBOARDS = {name: json.loads(content) for name, content in files().items()}
# Named in no panel: Triton's names, and what a panel shows under another one.
UNSHOWN = re.compile(r"nv_|process_(virtual|start)|headrace_(batches|model_process_up)")


@pytest.mark.parametrize("name", DASHBOARDS)
def test_the_committed_file_is_up_to_date(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == files()[name], "run `make docs`"


def test_no_other_file_is_there() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(DASHBOARDS)


@pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=DASHBOARDS)
def test_panels_have_unique_ids_and_positions(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        index = panel["gridPos"]
        assert index["x"] + index["w"] <= 24, panel["title"]
        own = {
            (x, y)
            for x in range(index["x"], index["x"] + index["w"])
            for y in range(index["y"], index["y"] + index["h"])
        }
        assert not own & cells, f"{panel['title']} lies on another"
        cells |= own


@pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=DASHBOARDS)
def test_every_variable_of_a_query_is_declared(dashboard: dict[str, Any]) -> None:
    declared = {variable["name"] for variable in dashboard["templating"]["list"]} | {"__rate_interval"}
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            assert set(re.findall(r"\$\{?(\w+)", target["expr"])) <= declared, panel["title"]
            assert target["datasource"]["uid"] == "${datasource}"
        assert panel["type"] == "row" or panel["targets"]


@pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=DASHBOARDS)
def test_annotations_have_queries_for_every_grafana_version(dashboard: dict[str, Any]) -> None:
    declared = {variable["name"] for variable in dashboard["templating"]["list"]} | {"__rate_interval"}
    annotations = dashboard["annotations"]["list"]
    assert [annotation["name"] for annotation in annotations] == ["Alerts", "Loads"]
    for annotation in annotations:
        assert annotation["target"]["expr"]
        assert not {"expr", "step"} & set(annotation), "an older form, which some versions ignore"
        assert set(re.findall(r"\$\{?(\w+)", annotation["target"]["expr"])) <= declared


def lost(written: Any, read: Any, path: str = "") -> Iterator[str]:
    """Return paths of the first that the second lacks."""
    if isinstance(written, dict) and isinstance(read, dict):
        for name, value in written.items():
            yield from lost(value, read[name], f"{path}.{name}") if name in read else [f"{path}.{name}"]
    elif isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        for index, pair in enumerate(zip(written, read, strict=True)):
            yield from lost(*pair, path=f"{path}.{index}")
    elif written != read:
        yield f"{path}: {written!r} became {read!r}"


def through_grafana(dashboard: dict[str, Any]) -> Any:
    """Return a dashboard after a round trip through Grafana's own classes."""
    needed = "`make test` installs it"
    schema = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason=needed)
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder", reason=needed)
    pytest.importorskip("grafana_foundation_sdk.cog.plugins", reason=needed).register_default_plugins()
    return json.loads(json.dumps(schema.Dashboard.from_json(dashboard), cls=encoder.JSONEncoder))


@pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=DASHBOARDS)
def test_grafana_accepts_every_field(dashboard: dict[str, Any]) -> None:
    missing = [path.lstrip(".") for path in lost(dashboard, through_grafana(dashboard))]
    assert [path for path in missing if not OF_PROMETHEUS.match(path)] == []


def test_an_unknown_field_is_detected() -> None:
    wrong = json.loads(json.dumps(DASHBOARDS["headrace-overview.json"]).replace('"stacking"', '"stacked"'))
    assert [path for path in lost(wrong, through_grafana(wrong)) if path.endswith(".custom.stacked")]


def test_every_metric_is_on_some_panel() -> None:
    shown = " ".join(files().values())
    shown += " ".join(r["expr"] for g in _recorded() for r in g["rules"])
    missing = [
        family.name for family in FAMILIES.values() if not UNSHOWN.match(family.name) and family.name not in shown
    ]
    assert missing == []


def _recorded() -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = yaml.safe_load(
        (FOLDER.parents[1] / "prometheus" / "headrace.rules.yml").read_text()
    )["groups"]
    return groups


def test_grafana_provisioning_names_their_folder() -> None:
    provisioning = FOLDER.parent / "provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "headrace.yaml").read_text())["providers"]
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert (source["type"], source["isDefault"]) == ("prometheus", True)
