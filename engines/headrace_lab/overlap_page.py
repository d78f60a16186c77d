"""Timeline and page of the overlap lab, and what its figures advise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from headrace_engines.report import milliseconds, page, rate, table
from headrace_reports.svg_plot import nth_colour, short, svg, text_element, ticks

from headrace_lab.overlap import STAGES, OverlapResult

_WIDTH, _LEFT, _RIGHT = 960, 96, 16
_LANE, _GAP, _TOP, _BOTTOM = 26, 6, 30, 40
_HEIGHT = _TOP + len(STAGES) * (_LANE + _GAP) + _BOTTOM
HEADINGS = ("mode", "rows/s", "batches", *STAGES, "GPU runs", "J/row", "power")
# Share of the time with a running model above which the GPU itself is the limit.
_BUSY = 0.9
_IDLE = 0.3


def timeline(result: OverlapResult, end_us: float) -> str:
    """Draw one lane for each stage with a bar for each batch, as SVG elements.

    Args:
        result: the measurement.
        end_us: end of the axis, the same for all timelines of a page.
    """
    marks = ticks(max(end_us, 1.0) / 1e3)
    scale = (_WIDTH - _LEFT - _RIGHT) / (marks[-1] * 1e3)
    title = "with overlap" if result.overlapped else "without overlap"
    parts = [text_element(f"{title}: {rate(result.rows_per_s)} rows/s", 0, 18, "t")]
    bottom = _TOP + len(STAGES) * (_LANE + _GAP)
    for mark in marks:
        x = _LEFT + mark * 1e3 * scale
        parts.append(f'<path d="M{x:.1f} {_TOP}V{bottom}" stroke="var(--line)"/>')
        parts.append(text_element(short(mark), x, bottom + 14, "s", "middle"))
    parts.append(text_element("milliseconds", (_LEFT + _WIDTH) / 2, bottom + 30, "s", "middle"))
    for number, stage in enumerate(STAGES):
        y = _TOP + number * (_LANE + _GAP)
        parts.append(text_element(stage, _LEFT - 8, y + _LANE / 2 + 4, "", "end"))
        for one in result.intervals:
            if one.stage == stage:
                x, width = _LEFT + one.start_us * scale, max((one.end_us - one.start_us) * scale, 0.75)
                label = f"batch {one.batch}, {stage}: {(one.end_us - one.start_us) / 1e3:.3f} ms"
                parts.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_LANE}" rx="2" fill="{nth_colour(one.batch)}">'
                    f"<title>{escape(label)}</title></rect>"
                )
                if width > 14:
                    parts.append(text_element(str(one.batch), x + width / 2, y + _LANE / 2 + 4, "n", "middle"))
    return "".join(parts)


def overlap_cells(result: OverlapResult) -> list[str]:
    """Return one measurement as plain text under `HEADINGS`."""
    energy, power = result.energy_each_j, result.load.power_w
    return [
        "with overlap" if result.overlapped else "without",
        rate(result.rows_per_s),
        str(result.batches),
        *(milliseconds(result.stage_us[stage]) for stage in STAGES),
        f"{result.run_share:.0%}",
        "-" if energy is None else f"{energy:.3g}",
        "-" if power is None else f"{power:.0f} W",
    ]


def overlap_page(title: str, machine: str, results: Sequence[OverlapResult], advice: Sequence[str]) -> str:
    """Return an HTML page with both timelines on one scale, a table, and the advice."""
    end_us = max((one.end_us for result in results for one in result.intervals), default=0.0)
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(machine)}</p>",
        '<p class="soft">Batches in the middle of each measurement; bars of one colour and number are one batch. GPU stages are '
        "timed by CUDA events, host stages by the host's clock; the two axes agree to some 10 us.</p>",
        *(f"{svg(timeline(one, end_us), _WIDTH, _HEIGHT, title)}" for one in results),
        "<h2>Figures</h2>",
        table(HEADINGS, [[escape(cell) for cell in overlap_cells(one)] for one in results]),
        *(
            f'<p class="soft">{"with overlap" if one.overlapped else "without"}: {escape(one.load.text())}</p>'
            for one in results
        ),
        "<h2>Advice</h2><ul>",
        *(f"<li>{escape(line)}</li>" for line in advice),
        "</ul>",
    ]
    return page(title, "\n".join(body), "svg{margin:1rem 0}.n{font-size:10px;fill:var(--paper)}")


def overlap_advice(sequential: OverlapResult, overlapped: OverlapResult, precision: str) -> list[str]:
    """Return sentences on instances, precision and choice of GPU from the figures of both modes.

    Args:
        sequential: measurement without overlap.
        overlapped: measurement with overlap.
        precision: precision of the engine.
    """
    stages = overlapped.stage_us
    longest = max(STAGES, key=lambda stage: stages[stage])
    total_us = sum(sequential.stage_us.values())
    gain = overlapped.rows_per_s / sequential.rows_per_s
    bound = total_us / max(sequential.stage_us.values())
    lines = [
        f"Overlap gives {gain:.2f} times the throughput; the longest stage, {longest}, would allow {bound:.2f} times."
    ]
    batches = max(math.ceil(total_us / max(stages["run"], 1e-3)), 1)
    if overlapped.run_share >= _BUSY:
        lines.append(
            f"Instances: the GPU runs the model {overlapped.run_share:.0%} of the time; one instance with batches in flight "
            "is enough, another one adds latency only."
        )
    elif longest == "run":
        lines.append(
            f"Instances: the GPU runs the model {overlapped.run_share:.0%} of the time; {min(batches, 4)} batches in flight "
            "(parameter pipeline_depth, or two instances) would fill the gaps."
        )
    else:
        workers = math.ceil(stages[longest] / max(stages["run"], 1e-3))
        lines.append(
            f"Instances: {longest} takes {stages[longest] / max(stages['run'], 1e-3):.1f} times as long as the model; the "
            f"GPU waits for it. {workers} times as many threads for it would keep the GPU busy, more instances of the model "
            "would not."
        )
    if longest == "preprocess":
        lines.append(
            "Preprocess: with `preprocess: {by: server}` the server's GPU normalises 8-bit pixels, not the host."
        )
    if precision == "fp32":
        lines.append(
            "Precision: the engine is FP32. Where `headrace compare` finds the accuracy sufficient, FP16 is faster."
        )
    elif longest == "run" and precision in ("fp16", "bf16"):
        lines.append("Precision: the model is the longest stage; `headrace compare` shows what INT8 gains and loses.")
    elif longest == "copy":
        lines.append(
            "Precision: copies are the longest stage; inputs of 8 or 16 bits are smaller, a faster model gains nothing."
        )
    return lines + _gpu_advice(overlapped)


def _gpu_advice(result: OverlapResult) -> list[str]:
    load = result.load
    lines = []
    if load.slowed:
        lines.append(
            f"GPU: the clocks were lowered by the {' and the '.join(load.slowed)}; a lower precision needs less energy, a GPU "
            "with a higher limit or better cooling keeps its clocks."
        )
    if result.run_share < _IDLE:
        lines.append(
            f"GPU: it runs the model {result.run_share:.0%} of the time; a smaller GPU, or more models on this one, would do."
        )
    elif result.run_share >= _BUSY and not load.slowed:
        lines.append("GPU: it is the limit at its full clocks; a faster or a second GPU raises the throughput.")
    if load.power_w is not None and load.power_limit_w:
        lines.append(f"Power: {load.power_w:.0f} of {load.power_limit_w:.0f} W; no clock and no limit was changed.")
    return lines
