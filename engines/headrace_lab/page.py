"""The map as a table in a terminal and as one HTML page without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from headrace.core.telemetry import GpuReading
from headrace_engines.report import Heading, narrow_table, page, table
from headrace_reports.svg_plot import colour, nth_colour, short, svg, text_element
from rich.console import Console

from headrace_lab.check import Errors
from headrace_lab.kernels.base import Epilogue
from headrace_lab.results import BASELINES, CandidateResult, Cell, ConvMap, fastest

_HEADINGS = (
    Heading("layer"),
    Heading("n", number=True),
    Heading("type"),
    Heading("work", rank=3),
    Heading("fastest of ours", rank=1),
    Heading("us", number=True),
    Heading("spread", number=True, rank=5),
    Heading("TFLOP/s", number=True, rank=4),
    Heading("roofline", number=True, rank=2),
    Heading("cuDNN us", number=True),
    Heading("TensorRT us", number=True),
    Heading("check", rank=1),
)
_CSS = """
details{margin:.4rem 0;border-bottom:1px solid var(--line)}summary{cursor:pointer;padding:.2rem 0}
td:nth-child(2){text-align:left;white-space:normal}.bad{color:#c62828;font-weight:600}
"""
_CUDNN = ("cudnn", "cudnn-unfused", "cudnn-fused")


def work_name(epilogue: Epilogue) -> str:
    """Return the measured work of a cell: "conv", or "conv bias residual relu"."""
    return " ".join(["conv", *(name for name in ("bias", "residual", "relu") if getattr(epilogue, name))])


def show(console: Console, result: ConvMap) -> None:
    """Print one row for each cell with the fastest of our algorithms and the baselines."""
    rows = [_row(cell) for cell in result.cells]
    title = (
        f"{result.title} on {result.gpu}, driver {result.driver or 'unknown'}, median of up to {result.rounds} rounds"
    )
    console.print(narrow_table(title, _HEADINGS, rows, console.width))


def _row(cell: Cell) -> list[str]:
    best = fastest(r for r in cell.results if r.is_own)
    timing = best.timing if best is not None else None
    return [
        cell.layer,
        str(cell.shape.n),
        cell.precision,
        work_name(cell.epilogue),
        " ".join((best.name, best.variant)).strip() if best is not None else "none",
        f"{timing.median_us:.2f}" if timing else "",
        f"±{50 * (timing.high_us - timing.low_us) / timing.median_us:.1f}%" if timing and timing.median_us else "",
        f"{cell.shape.flops / timing.median_us / 1e6:.3g}" if timing and timing.median_us else "",
        f"{cell.floor_us / timing.median_us:.0%}" if timing and timing.median_us else "",
        *(f"{us:.2f}" if (us := cell.time_us(*names)) is not None else "" for names in (_CUDNN, ("tensorrt",))),
        _checks(cell),
    ]


def _checks(cell: Cell) -> str:
    """Candidates whose results are wrong, or right by the bound of FP16 accumulation."""
    checked = [(r.name, r.errors) for r in cell.results if r.errors is not None]
    wrong = ", ".join(name for name, errors in checked if not errors.is_right)
    half = ", ".join(name for name, errors in checked if errors.is_right and errors.needs_half_bound)
    return "; ".join([*([f"WRONG: {wrong}"] if wrong else []), *([f"FP16 sums: {half}"] if half else [])])


def map_page(result: ConvMap) -> str:
    """Return the HTML page: conditions, summary, winners as grids, and every measurement with its spread."""
    body = [
        f"<h1>Convolutions: {escape(result.title)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in conditions(result)),
        "<h2>Winners</h2>",
        '<p class="soft">One square for each layer and batch size: the fastest right result, its time in us, and the speed of '
        "the fastest of ours relative to the fastest of cuDNN (above 1: faster than cuDNN).</p>",
        *_grids(result.cells),
        "<h2>Summary</h2><ul>",
        *(f"<li>{escape(line)}</li>" for line in (*result.summary, *(f"note: {note}" for note in result.notes))),
        "</ul>",
        "<h2>Measurements</h2>",
        '<p class="soft">Time of one launch in us: median, quartiles and extremes over the rounds; the bar shows extremes '
        "(line), quartiles (box) and median. Roofline: the least time that bytes and operations of a direct convolution "
        "need, over the measured one; algorithms with fewer operations, and weights or activations that the L2 cache "
        "holds, can exceed 100%. Bound: the largest error over its bound; of a kernel that accumulates in FP16, "
        "over that of FP32 accumulation and, after it, over its own.</p>",
        *_details(result.cells),
    ]
    return page(f"Convolutions: {result.title}", "\n".join(body), _CSS)


def conditions(result: ConvMap) -> list[str]:
    """Return sentences on machine, libraries, ceilings, clocks and method."""
    roofline = result.roofline
    peaks = ", ".join(f"{name} {rate / 1e12:.0f} TFLOP/s" for name, rate in roofline.flops_per_s.items())
    ceilings = f"Ceilings measured here: copy {roofline.bytes_per_s / 1e12:.2f} TB/s (bytes read and written)"
    ceilings += (
        f"; {peaks} ({roofline.source})." if peaks else "; no matrix product was measured, the floor counts bytes only."
    )
    versions = "; ".join(f"{name}: {text}" for name, text in result.versions.items())
    states = [f"{when}: {_state(reading)}" for when, reading in (("before", result.before), ("after", result.after))]
    slowed = sorted({reason for cell in result.cells for reason in cell.slowed})
    clocks = [cell.sm_clock_hz for cell in result.cells if cell.sm_clock_hz]
    spread = f" SM clock between cells {min(clocks) / 1e6:.0f} to {max(clocks) / 1e6:.0f} MHz." if clocks else ""
    return [
        f"{result.gpu}, compute capability {result.capability}, driver {result.driver or 'unknown'}.",
        f"Baselines: {versions or 'none'}.",
        ceilings,
        f"{'; '.join(states)}.{spread} Clocks were lowered by: {', '.join(slowed) or 'nothing'}.",
        f"CUDA graphs of up to 256 launches, up to {result.rounds} rounds interleaved over the candidates. Random activations "
        "rotate over sets that exceed the L2 cache twice; weights are one set. Outputs are filled with NaN before each check. "
        f"{len(result.cells)} cells in {result.seconds:.0f} s; kernels were compiled beside the first "
        f"{result.compile_seconds:.0f} s.",
    ]


def _state(reading: GpuReading | None) -> str:
    if reading is None:
        return "state unknown, NVML does not respond"
    parts = [f"{name} {hz / 1e6:.0f} MHz" for name, hz in reading.clocks_hz.items()]
    if reading.power_w is not None:
        parts.append(f"{reading.power_w:.0f} W")
    if reading.temperature_c is not None:
        parts.append(f"{reading.temperature_c:.0f} °C")
    active = [reason for reason, slowed in reading.slowed.items() if slowed]
    return ", ".join([*parts, f"slowed by {', '.join(active)}" if active else "not slowed"])


_SQUARE_WIDTH, _SQUARE_HEIGHT, _LABEL = 150, 34, 180
# Colours of our algorithms; the baselines share the colour of everything else.
_OWN_COLOURS = 5


def _grids(cells: Sequence[Cell]) -> list[str]:
    names = list(dict.fromkeys(result.name for cell in cells for result in cell.results))
    parts = [_legend(names)]
    for precision in dict.fromkeys(cell.precision for cell in cells):
        for is_plain, label in ((True, "convolution alone"), (False, "with its epilogue")):
            mine = [cell for cell in cells if (cell.precision, cell.is_plain) == (precision, is_plain)]
            if mine:
                parts.append(f"<h3>{precision.upper()}, {label}</h3>{winner_grid(mine, names)}")
    return parts


def _legend(names: Sequence[str]) -> str:
    items = "".join(
        f'<li><span class="dot" style="background:{_ink(name, names)}"></span>{escape(name)}</li>' for name in names
    )
    return f'<ul class="legend">{items}</ul>'


def _ink(name: str, names: Sequence[str]) -> str:
    if name in BASELINES:
        return colour("other")
    return nth_colour([other for other in names if other not in BASELINES].index(name) % _OWN_COLOURS)


def winner_grid(cells: Sequence[Cell], names: Sequence[str]) -> str:
    """Draw the winners as SVG: a row for each layer, by kernel and channels, a column for each batch size.

    Args:
        cells: cells of one precision and one kind of work.
        names: names of all candidates, in the order of their colours.
    """
    layers = list(dict.fromkeys((c.shape.r, c.shape.s, c.shape.c, c.shape.k, c.layer) for c in cells))
    batches = sorted({cell.shape.n for cell in cells})
    found = {(cell.layer, cell.shape.n): cell for cell in cells}
    parts = [
        text_element(f"n {n}", _LABEL + column * _SQUARE_WIDTH + _SQUARE_WIDTH / 2, 14, "s", "middle")
        for column, n in enumerate(batches)
    ]
    for row, (*_, layer) in enumerate(sorted(layers)):
        y = 22 + row * _SQUARE_HEIGHT
        parts.append(text_element(layer, 0, y + 20))
        for column, n in enumerate(batches):
            if (layer, n) in found:
                parts.append(_square(found[layer, n], names, _LABEL + column * _SQUARE_WIDTH, y))
    width, height = _LABEL + len(batches) * _SQUARE_WIDTH, 26 + len(layers) * _SQUARE_HEIGHT
    return f'<div style="max-width:{width}px">{svg("".join(parts), width, height, "fastest candidate by layer and batch")}</div>'


def _square(cell: Cell, names: Sequence[str], x: float, y: float) -> str:
    winner = cell.winner()
    if winner is None or winner.timing is None:
        return text_element("none", x + _SQUARE_WIDTH / 2, y + 20, "s", "middle")
    own, cudnn = fastest(r for r in cell.results if r.is_own), cell.time_us(*_CUDNN)
    ratio = f"ours {cudnn / own.timing.median_us:.2f}x" if own is not None and own.timing is not None and cudnn else ""
    ink = _ink(winner.name, names)
    label = f"{cell.layer}, n {cell.shape.n}: {winner.name} {winner.variant} {winner.timing.median_us:.2f} us"
    width, height = _SQUARE_WIDTH - 3, _SQUARE_HEIGHT - 3
    return (
        f'<g><title>{escape(label)}</title><rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" fill="{ink}" '
        f'opacity=".28"/>{text_element(winner.name, x + 4, y + 13)}'
        f"{text_element(f'{short(winner.timing.median_us)} us {ratio}', x + 4, y + 27, 's')}</g>"
    )


def _details(cells: Sequence[Cell]) -> list[str]:
    parts = []
    for cell in cells:
        winner = cell.winner()
        work, name = work_name(cell.epilogue), winner.name if winner else "none"
        title = f"{cell.layer}, n {cell.shape.n}, {cell.precision}, {work}: {name}"
        longest = max((r.timing.max_us for r in cell.results if r.timing is not None), default=1.0)
        ranked = sorted(cell.results, key=lambda r: r.timing.median_us if r.timing is not None else float("inf"))
        rows = [_measurement(cell, result, longest) for result in ranked]
        headings = (
            "candidate",
            "variant or reason",
            "us",
            "quartiles",
            "extremes",
            "",
            "TFLOP/s",
            "roofline",
            "bound",
            "error",
        )
        parts.append(f"<details><summary>{escape(title)}</summary>{table(headings, rows)}</details>")
    return parts


def _measurement(cell: Cell, result: CandidateResult, longest_us: float) -> list[str]:
    timing, errors = result.timing, result.errors
    note = " ".join(
        filter(None, (result.variant, f"(fastest of {result.tried})" if result.tried > 1 else "", result.reason))
    )
    wrong = errors is not None and not errors.is_right
    row = [escape(result.name), f'<span class="bad">{escape(note)}</span>' if wrong else escape(note)]
    if timing is None or not timing.median_us:
        row += [""] * 6
    else:
        row += [
            f"{timing.median_us:.2f}",
            f"{timing.low_us:.2f} to {timing.high_us:.2f}",
            f"{timing.min_us:.2f} to {timing.max_us:.2f} of {timing.rounds}",
            _whisker(result, longest_us),
            f"{cell.shape.flops / timing.median_us / 1e6:.3g}",
            f"{cell.floor_us / timing.median_us:.0%}",
        ]
    row += [_shares(errors), f"max {errors.max_error:.2g}, mean {errors.mean_error:.2g}"] if errors else ["", ""]
    return row


def _shares(errors: Errors) -> str:
    half = f"; FP16 accumulation: {errors.half_share:.3g}" if errors.half_share is not None else ""
    return f"{errors.worst_share:.3g}{half}"


def _whisker(result: CandidateResult, longest_us: float) -> str:
    timing = result.timing
    assert timing is not None
    lowest, low, middle, high, highest = (
        100 * us / longest_us for us in (timing.min_us, timing.low_us, timing.median_us, timing.high_us, timing.max_us)
    )
    ink = nth_colour(0) if result.is_own else colour("other")
    return (
        f'<svg viewBox="0 0 104 12" style="width:104px"><path d="M{lowest:.1f} 6H{highest:.1f}" stroke="{ink}"/>'
        f'<rect x="{low:.1f}" y="3" width="{max(high - low, 0.5):.1f}" height="6" fill="{ink}" opacity=".5"/>'
        f'<path d="M{middle:.1f} 1v10" stroke="{ink}" stroke-width="2"/></svg>'
    )
