"""`python -m deploy.grafana.dashboards` writes the dashboards of dashboards.yaml in Grafana's JSON.

Panels lie beside each other in rows, from left to right, in a grid of 24 columns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

Json = dict[str, Any]
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24
# Of Grafana 11; later ones read and update it.
SCHEMA_VERSION = 39


@dataclass(frozen=True)
class Query:
    """One query of a panel.

    Attributes:
        expr: in PromQL, with the dashboard's variables.
        legend: of its series, with labels in double braces.
    """

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        title, description: as shown; the description explains the values.
        queries: in order.
        unit: of the values, under Grafana's name.
        kind: Grafana's name of the panel: timeseries, stat, table, heatmap, bargauge.
        width, height: in Grafana's grid.
        most: upper end of the axis; None for the data's own.
        steps: (from value, colour) for colours by value.
        stacked: series stand on one another.
    """

    title: str
    queries: Sequence[Query]
    unit: str = "short"
    description: str = ""
    kind: str = "timeseries"
    width: int = 8
    height: int = 8
    most: int | float | None = None
    steps: Sequence[tuple[int | float | None, str]] = ()
    stacked: bool = False
    exemplars: bool = False

    def to_json(self, number: int, x: int, y: int) -> Json:
        """At a place in the grid."""
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": SOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "targets": [self._target(place, query) for place, query in enumerate(self.queries)],
            "fieldConfig": {"defaults": self._defaults(), "overrides": []},
            "options": _OPTIONS.get(self.kind, {}),
            **_EXTRA.get(self.kind, {}),
        }

    def _target(self, place: int, query: Query) -> Json:
        instant = self.kind in ("table", "stat", "bargauge")
        return {
            "refId": chr(ord("A") + place),
            "datasource": SOURCE,
            "expr": query.expr,
            "legendFormat": query.legend or "__auto",
            "instant": instant,
            "range": not instant,
            "format": {"table": "table", "heatmap": "heatmap"}.get(self.kind, "time_series"),
            "exemplar": self.exemplars,
        }

    def _defaults(self) -> Json:
        found: Json = {"unit": self.unit, "min": 0}
        if self.most is not None:
            found["max"] = self.most
        if self.kind == "timeseries":
            stacking = {"mode": "normal" if self.stacked else "none"}
            found["custom"] = {"lineWidth": 1, "fillOpacity": 25 if self.stacked else 5, "stacking": stacking}
        if self.steps:
            steps = [{"value": value, "color": colour} for value, colour in self.steps]
            found["thresholds"] = {"mode": "absolute", "steps": steps}
        return found


@dataclass(frozen=True)
class Row:
    """Panels under one heading.

    Attributes:
        title: of the heading.
        panels: from left to right, as many in a line as fit.
    """

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Dashboard:
    """One dashboard.

    Attributes:
        uid: in its address; never changes.
        title, description: as shown.
        rows: from top to bottom.
        variables: name -> query of its values; those of the data source and of the job are always there.
        many: variables that may have several values at once.
    """

    uid: str
    title: str
    description: str
    rows: Sequence[Row]
    variables: Mapping[str, str] = field(default_factory=dict)
    many: frozenset[str] = frozenset()

    def to_json(self) -> Json:
        """As Grafana imports it."""
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": ["headrace"],
            "schemaVersion": SCHEMA_VERSION,
            "editable": False,
            "graphTooltip": 1,
            "refresh": "10s",
            "time": {"from": "now-1h", "to": "now"},
            "timezone": "browser",
            "links": [_LINK],
            "annotations": {"list": [_ALERTS, _LOADS]},
            "templating": {"list": [_DATA_SOURCE, *map(self._variable, [("job", _JOB), *self.variables.items()])]},
            "panels": self._panels(),
        }

    def _variable(self, variable: tuple[str, str]) -> Json:
        name, query = variable
        many = name in self.many or name == "job"
        return {
            "type": "query",
            "name": name,
            "datasource": SOURCE,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "sort": 1,
            "multi": many,
            "includeAll": many,
            "current": {"text": ["All"], "value": ["$__all"]} if many else {},
        }

    def _panels(self) -> list[Json]:
        found: list[Json] = []
        y = 0
        for row in self.rows:
            found.append({"id": len(found) + 1, "type": "row", "title": row.title, "collapsed": False, "panels": [],
                          "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1}})  # fmt: skip
            y, x, height = y + 1, 0, 0
            for panel in row.panels:
                if x + panel.width > COLUMNS:
                    y, x, height = y + height, 0, 0
                found.append(panel.to_json(len(found) + 1, x, y))
                x, height = x + panel.width, max(height, panel.height)
            y += height
        return found


_JOB = "label_values(headrace_build_info, job)"
_DATA_SOURCE = {"type": "datasource", "name": "datasource", "query": "prometheus", "label": "Prometheus", "current": {}}
_LINK = {
    "type": "dashboards", "tags": ["headrace"], "title": "Headrace", "asDropdown": True, "includeVars": True,
    "keepTime": True,
}  # fmt: skip


def _annotation(name: str, expr: str, title: str, text: str, colour: str) -> Json:
    """Marks on every panel at the times for which a query has values."""
    return {
        "name": name,
        "datasource": SOURCE,
        "enable": True,
        "iconColor": colour,
        "titleFormat": title,
        "textFormat": text,
        # Some versions of Grafana look for the query nowhere else, and leave the annotation out without an error.
        "target": {"refId": "Anno", "expr": expr},
    }


_ALERTS = _annotation(
    "Alerts", 'ALERTS{alertname=~"Headrace.+",alertstate="firing"}', "{{alertname}}", "{{model}} {{instance}}", "red"
)
# The range reaches beyond the last step, or loads between its last scrape and the next step's first would be missed.
_LOADS = _annotation(
    "Loads",
    'changes(headrace_model_loads_total{job=~"$job"}[$__rate_interval]) > 0',
    "{{model}} {{result}}",
    "",
    "blue",
)
_OPTIONS: dict[str, Json] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "colorMode": "background"},
    "bargauge": {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "orientation": "horizontal",
        "displayMode": "basic",
    },
    "table": {"showHeader": True, "cellHeight": "sm"},
    "heatmap": {
        "calculate": False,
        "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
        "yAxis": {"unit": "s"},
    },
}
_EXTRA: dict[str, Json] = {
    "table": {
        "transformations": [
            {"id": "organize", "options": {"excludeByName": {"Time": True, "__name__": True, "job": True}}},
        ]
    }
}

FOLDER = Path(__file__).parent / "dashboards"
DASHBOARDS = msgspec.yaml.decode(FOLDER.with_suffix(".yaml").read_bytes(), type=list[Dashboard])


def files() -> dict[str, str]:
    """Content of every dashboard's file, by its name."""
    return {f"{one.uid}.json": json.dumps(one.to_json(), indent=1, ensure_ascii=False) + "\n" for one in DASHBOARDS}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, content in files().items():
        (FOLDER / name).write_text(content, encoding="utf-8")
