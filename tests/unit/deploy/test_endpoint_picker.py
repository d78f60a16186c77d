"""The configuration of the endpoint picker names metrics that the server has, without labels, and plugins that it declares."""

from __future__ import annotations

from typing import Any

import yaml
from headrace.observability.metrics_table import FAMILIES

from tests.support.serving import ROOT


def test_the_endpoint_picker_reads_gauges_of_the_whole_server() -> None:
    config = yaml.safe_load((ROOT / "deploy" / "gateway" / "endpoint-picker.yaml").read_text())
    plugins: dict[str, Any] = {plugin["type"]: plugin.get("parameters", {}) for plugin in config["plugins"]}
    extractor = plugins["core-metrics-extractor"]
    (engine,) = extractor["engineConfigs"]
    assert engine["name"] == extractor["defaultEngine"]
    specs = [value for name, value in engine.items() if name.endswith("Spec")]
    specs += [custom["metricSpec"] for custom in engine["customMetrics"]]
    for name in specs:
        assert (FAMILIES[name].kind, FAMILIES[name].labels) == ("gauge", ()), name
    assert plugins["metrics-data-source"]["families"] == specs
    named = [each["pluginRef"] for profile in config["schedulingProfiles"] for each in profile["plugins"]]
    named += [each["pluginRef"] for each in config["requestHandler"]["parsers"]]
    named += [each["pluginRef"] for each in config["dataLayer"]["sources"]]
    assert set(named) <= set(plugins)
