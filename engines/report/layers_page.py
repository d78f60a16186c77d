"""The page of `headrace inspect`: a bar a layer, coloured by precision."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from engines.inspection import Inspection
from engines.report.page import page, table
from engines.report.style import milliseconds, rate
from engines.targets.base import Layer
from server.core.svg_plot import colour

_CSS = """
.sum{display:flex;height:1.6rem;border-radius:.3rem;overflow:hidden;margin:.8rem 0;background:var(--line)}
.sum span{display:block}
ol{padding:0;margin:0;list-style:none}
ol li{display:grid;grid-template:"name time""kind kind""bar bar"/minmax(0,1fr) auto;gap:.1rem .8rem;padding:.4rem 0;
border-bottom:1px solid var(--line)}
ol b,ol small{overflow-wrap:anywhere}ol b{font-weight:600}ol small{color:var(--soft)}
ol .name{grid-area:name}ol .kind{grid-area:kind}
ol .time{grid-area:time;text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
ol .bar{grid-area:bar;height:.55rem;border-radius:.2rem;min-width:2px}
@media (min-width:60rem){
ol li{grid-template:"name kind time bar"/minmax(0,2fr) minmax(0,1.7fr) 9rem minmax(0,2.6fr);align-items:center;padding:.2rem 0}
ol .bar{height:1rem}}
"""


def layers_page(inspection: Inspection) -> str:
    """HTML of everything that is known of an engine's layers, in the order in which they run."""
    layers = inspection.layers
    longest_us = max((layer.time_us for layer in layers), default=0.0) or 1.0
    title = f"{inspection.model} {inspection.version}: layers"
    body = [
        f"<h1>{escape(inspection.model)} <small>version {inspection.version}</small></h1>",
        f"<p>{escape(inspection.title)}</p>",
        f"<p>{escape(inspection.machine_text)}</p>",
        f'<p class="soft">This is the model itself: {escape(inspection.reason)}.</p>' if inspection.reason else "",
        f"<p><b>{milliseconds(inspection.timing.median_us)}</b> an execution (p99 {milliseconds(inspection.timing.p99_us)}), "
        f"<b>{rate(inspection.timing.rows_per_s)}</b> rows/s; {len(layers)} layers take "
        f"{milliseconds(inspection.total_us)} together under the profiler</p>",
        _by_precision(inspection),
        "<h2>Layers in order</h2><ol>",
        *(_layer(layer, longest_us) for layer in layers),
        "</ol><h2>By kind</h2>",
        _by_kind(layers),
    ]
    return page(title, "\n".join(body), _CSS)


def _layer(layer: Layer, longest_us: float) -> str:
    nodes = ", ".join(layer.nodes)
    told = " · ".join(word for word in (layer.kind, layer.precision, layer.tactic) if word)
    head = f"<b>{escape(nodes)}</b>" if nodes else f'<span class="soft">{escape(layer.name)}</span>'
    name = f"<br><small>{escape(layer.name)}</small>" if nodes and nodes != layer.name else ""
    return (
        f'<li><div class="name">{head}{name}</div><small class="kind">{escape(told)}</small>'
        f'<div class="time">{layer.time_us:,.1f} us <span class="soft">{layer.share:.1%}</span></div>'
        f'<div class="bar" style="width:{100 * layer.time_us / longest_us:.2f}%;background:{colour(layer.precision)}"></div></li>'
    )


def _by_precision(inspection: Inspection) -> str:
    shares = inspection.shares()
    strip = "".join(
        f'<span style="width:{100 * share:.2f}%;background:{colour(name)}"></span>' for name, share in shares.items()
    )
    names = "".join(
        f'<li><span class="dot" style="background:{colour(name)}"></span>{escape(name or "not told")} {share:.1%}</li>'
        for name, share in shares.items()
    )
    return f'<div class="sum">{strip}</div><ul class="legend">{names}</ul>'


def _by_kind(layers: Sequence[Layer]) -> str:
    kinds: dict[str, list[Layer]] = {}
    for layer in layers:
        kinds.setdefault(layer.kind, []).append(layer)
    ranked = sorted(kinds.items(), key=lambda item: -sum(layer.time_us for layer in item[1]))
    rows = [
        [
            escape(kind),
            str(len(found)),
            f"{sum(layer.time_us for layer in found):,.1f}",
            f"{sum(layer.share for layer in found):.1%}",
        ]
        for kind, found in ranked
    ]
    return table(("kind", "layers", "us", "share"), rows)
