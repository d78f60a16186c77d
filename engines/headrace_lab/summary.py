"""Summary of a map: medians over layers of the ratios that the issue and the pages quote."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median

from headrace_lab.check import HALF_VERDICT
from headrace_lab.results import BASELINES, CandidateResult, Cell

# Implicit GEMM on Tensor Cores, with mma.sync and with wgmma; in float32 without Tensor Cores.
_GEMMS = ("implicit-gemm", "implicit-gemm-hopper", "simt-gemm")


def summarize_map(cells: Sequence[Cell]) -> list[str]:
    """Return sentences with the medians over layers, for each precision and batch size.

    A ratio above 1 means that the first-named is faster. Wrong results do not count.
    """
    lines = _correctness(cells)
    precisions = list(dict.fromkeys(cell.precision for cell in cells))
    for precision in precisions:
        own = [cell for cell in cells if cell.precision == precision]
        lines += _against_cudnn(precision, [cell for cell in own if cell.is_plain])
        lines += _fused(precision, [cell for cell in own if not cell.is_plain])
        lines += _winograd(precision, [cell for cell in own if cell.is_plain])
    lines += _kernel_sizes([cell for cell in cells if cell.is_plain])
    return lines


def _correctness(cells: Sequence[Cell]) -> list[str]:
    checked = [(cell, r) for cell in cells for r in cell.results if r.errors is not None]
    wrong = [
        f"{r.name} {r.variant} on {cell.layer} n {cell.shape.n} {cell.precision} ({r.reason})"
        for cell, r in checked
        if r.errors is not None and not r.errors.is_right
    ]
    lines = [f"{len(checked) - len(wrong)} of {len(checked)} results are within their bounds"]
    lines += [f"wrong: {text}" for text in wrong[:20]]
    return lines + _half_sums([(cell, r) for cell, r in checked if r.errors and r.errors.is_right])


def _half_sums(results: Sequence[tuple[Cell, CandidateResult]]) -> list[str]:
    """Right results that have the second bound, by candidate; the ratios count them, so they are named."""
    lines = []
    for name in dict.fromkeys(r.name for _, r in results):
        shares = [
            (r.errors.half_share or 0.0, r.errors.worst_share, _where(cell))
            for cell, r in results
            if r.name == name and r.errors and r.errors.needs_half_bound
        ]
        if shares:
            lines.append(
                f"{HALF_VERDICT}: {len(shares)} of {sum(r.name == name for _, r in results)} results of {name}, largest error "
                f"{max(shares)[0]:.2g} of that bound and {max(share for _, share, _ in shares):.3g} times the bound of FP32 "
                f"accumulation ({max(shares)[2]}); its kernels round sums to FP16, ours do not"
            )
    return lines


def _names(cells: Iterable[Cell]) -> list[str]:
    names = dict.fromkeys(result.name for cell in cells for result in cell.results if result.timing is not None)
    return [name for name in names if name not in BASELINES]


def _ratios(cells: Iterable[Cell], slow: Callable[[Cell], float | None], *fast: str) -> list[tuple[float, Cell]]:
    pairs = []
    for cell in cells:
        over, under = slow(cell), cell.time_us(*fast)
        if over is not None and under is not None:
            pairs.append((over / under, cell))
    return pairs


def _line(subject: str, ratios: Sequence[tuple[float, Cell]]) -> list[str]:
    if not ratios:
        return []
    worst, best = min(ratios, key=lambda pair: pair[0]), max(ratios, key=lambda pair: pair[0])
    batches = _batches(cell for _, cell in ratios)
    by_batch = ", ".join(f"n {n}: {median(r for r, cell in ratios if cell.shape.n == n):.2f}" for n in batches)
    return [
        f"{subject}: median {median(ratio for ratio, _ in ratios):.2f}"
        + (f" ({by_batch})" if len(batches) > 1 else "")
        + f", worst {worst[0]:.2f} ({_where(worst[1])}), best {best[0]:.2f} ({_where(best[1])}), of {len(ratios)}"
    ]


def _where(cell: Cell) -> str:
    return f"{cell.layer} n {cell.shape.n}"


def _batches(cells: Iterable[Cell]) -> list[int]:
    return sorted({cell.shape.n for cell in cells})


def _against_cudnn(precision: str, cells: Sequence[Cell]) -> list[str]:
    lines = []
    for name in _names(cells):
        ratios = _ratios(cells, lambda cell: cell.time_us("cudnn"), name)
        lines += _line(f"{precision} time(cuDNN)/time({name})", ratios)
    ratios = _ratios(cells, lambda cell: cell.time_us("cudnn"), *_names(cells))
    return lines + _line(f"{precision} time(cuDNN)/time(fastest of ours)", ratios)


def _fused(precision: str, cells: Sequence[Cell]) -> list[str]:
    lines = []
    with_residual = [cell for cell in cells if cell.epilogue.residual]
    for subject, chosen in (("with a residual", with_residual), ("all epilogues", list(cells))):
        for names in (_GEMMS, tuple(_names(cells))):
            label = "faster implicit GEMM" if names == _GEMMS else "fastest of ours"
            for baseline in BASELINES[1:]:
                ratios = _ratios(chosen, lambda cell, name=baseline: cell.time_us(name), *names)  # type: ignore[misc]
                lines += _line(f"{precision} fused, {subject}: time({baseline})/time({label})", ratios)
    return lines


def _winograd(precision: str, cells: Sequence[Cell]) -> list[str]:
    lines = []
    chosen = [cell for cell in cells if cell.shape.r == cell.shape.s == 3 and min(cell.shape.c, cell.shape.k) >= 64]
    chosen = [cell for cell in chosen if cell.shape.stride == 1]
    names = _names(chosen)
    gemms = [name for name in names if "gemm" in name]
    for name in names:
        if not name.startswith("winograd"):
            continue
        ratios = _ratios(chosen, lambda cell: cell.time_us(*gemms), name)
        subject = f"{precision} 3x3, stride 1, at least 64 channels: time(our implicit GEMM)/time({name})"
        lines += _line(subject, ratios)
        for n in _batches(chosen):
            mine = [pair for pair in ratios if pair[1].shape.n == n]
            wins = [cell.layer for ratio, cell in mine if ratio > 1]
            losses = [cell.layer for ratio, cell in mine if ratio <= 1]
            if mine:
                lines.append(f"  n {n}: wins on {', '.join(wins) or 'none'}; loses on {', '.join(losses) or 'none'}")
    return lines


def _kernel_sizes(cells: Sequence[Cell]) -> list[str]:
    """The kernel size from which FFT wins, by precision and batch size, where at least three sizes are measured."""
    lines = []
    for precision in dict.fromkeys(cell.precision for cell in cells):
        for n in _batches(cells):
            mine = sorted(
                (cell for cell in cells if (cell.precision, cell.shape.n) == (precision, n)),
                key=lambda cell: cell.shape.r,
            )
            if len({cell.shape.r for cell in mine}) < 3:
                continue
            others = [name for name in _names(mine) if name != "fft"]
            for rivals, label in ((others, "our other algorithms"), (["cudnn"], "cuDNN")):
                ratios = [
                    (cell.shape.r, over / under)
                    for cell in mine
                    if (over := cell.time_us(*rivals)) and (under := cell.time_us("fft"))
                ]
                if ratios:
                    first = _crossover(ratios)
                    text = ", ".join(f"{size}: {ratio:.2f}" for size, ratio in ratios)
                    where = f"FFT wins from {first}x{first} on" if first else "FFT does not win"
                    lines.append(f"{precision} n {n}: {where} against {label} (time ratio by kernel size {text})")
    return lines


def _crossover(ratios: Sequence[tuple[int, float]]) -> int:
    """Return the smallest size from which every ratio is above 1; 0 if there is none."""
    first = 0
    for size, ratio in reversed(ratios):
        if ratio <= 1:
            break
        first = size
    return first
