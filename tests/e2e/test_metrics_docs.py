"""docs/metrics.md has exactly the metrics of a running server: the same names, types and labels."""

from __future__ import annotations

import json

from headrace.observability.metrics_table import FAMILIES

from deploy.metrics_page import NAME, page
from tests.support.prometheus import read_page
from tests.support.serving import ROOT, Server


def test_the_committed_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / NAME).read_text(encoding="utf-8") == page(), "run `make docs`"


def test_no_name_is_there_twice() -> None:
    names = [family.name for family in FAMILIES.values()]
    assert len(set(names)) == len(names)


def test_the_table_matches_the_metrics_of_a_server(server: Server) -> None:
    server.request("POST", "/v2/models/affine/infer", b"{}")  # an error to count
    tensor = {"name": "X", "datatype": "FP32", "shape": [1, 16], "data": [1.0] * 16}
    server.request("POST", "/v2/models/affine/infer", json.dumps({"inputs": [tensor]}).encode())
    documented = FAMILIES
    shown = {
        # The reader takes the suffix off; Triton's counters have none.
        family.name + ("_total" if family.type == "counter" and family.name not in documented else ""): family
        for family in read_page(server.request("GET", "/metrics")[2].decode())
    }
    assert set(shown) == set(documented)
    for name, family in shown.items():
        assert (family.type, family.documentation) == (documented[name].kind, documented[name].text), name
        bounds = {"histogram": {"le"}, "summary": {"quantile"}}.get(family.type, set())
        labels = {frozenset(sample.labels) - bounds for sample in family.samples}
        assert labels <= {frozenset(documented[name].labels)}, name
        assert family.samples or documented[name].when, f"{name} has no series"
