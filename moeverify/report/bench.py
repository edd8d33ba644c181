"""Console output of `moeverify bench`: one row per case, then the rates of the machine's parts alone."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moeverify.report.console import new_table, print_table
from moeverify.report.sanitize import clean
from moeverify.results.measurement import BenchRun, Measurement

_GIB = 2.0**30


def render_bench(result: BenchRun, console: Console) -> None:
    """Print all measurements; the table of operator kinds is printed only if a profile was requested."""
    measured = [case for case in result.cases if case.step is not None]
    if measured:
        print_table(_make_table(measured, console), console)
        console.print()
        print_table(_make_traffic_table(measured, console), console)
        console.print()
        if any(case.profile for case in measured):
            print_table(_make_work_table(measured, console), console)
            console.print()
    for case in result.cases:
        if case.step is None:
            console.print(Text(clean(f"{case.name}: not measured: {case.reason}")), soft_wrap=True)
    line = ", ".join(f"{key} {value}" for key, value in result.environment.items())
    console.print(Text(clean(line), style="dim"), soft_wrap=True)
    if not measured:
        return
    legend = (
        f"{result.warmup} steps of warm-up, then {result.steps} measured: median (least to most). TFLOP/s and "
        "memory are a rank's; peak is one large matrix product in the same run; comm is the part of a profiled "
        "step in which collectives ran, and in brackets the part in which nothing else did. A floor is the least "
        "time of a step at the rate beside it: its model operations, the bytes that its operations read and write "
        "one by one, or their launches by the host."
    )
    console.print(Text(legend, style="dim"), soft_wrap=True)


def _new_table(console: Console, *headers: str) -> Table:
    table = new_table(console)
    table.add_column(headers[0], overflow="fold")
    for header in headers[1:]:
        table.add_column(header, justify="right", no_wrap=True)
    return table


def _make_table(cases: list[Measurement], console: Console) -> Table:
    headers = ("case", "ranks", "ms a step", "tokens/s", "TFLOP/s", "of peak", "GiB", "comm", "steps/s")
    table = _new_table(console, *headers)
    first = cases[0].step
    for case in cases:
        step, roofline = case.step, case.roofline
        assert step is not None
        assert first is not None
        peak = _share(case.flops, roofline.matmul if roofline else None)
        table.add_row(
            clean(case.name),
            str(case.ranks),
            f"{step.median * 1e3:.1f} ({step.least * 1e3:.1f} to {step.most * 1e3:.1f})",
            _number(case.tokens_per_second, 1.0),
            _number(case.flops, 1e12),
            peak,
            _number(case.peak_memory, _GIB),
            f"{_share(case.communication, step.median)} ({_share(case.exposed, step.median)})",
            f"{first.median / step.median:.2f} x",
        )
    return table


def _make_traffic_table(cases: list[Measurement], console: Console) -> Table:
    table = _new_table(console, "part", "case", "a step", "ms", "MB", "GB/s bus", "alone")
    for case in cases:
        roofline = case.roofline
        for part, count in _count_work(case):
            table.add_row(part, clean(case.name), str(count), "", "", "", "")
        for traffic in case.traffic:
            alone = roofline.collectives.get(traffic.kind) if roofline else None
            table.add_row(
                traffic.kind,
                clean(case.name),
                str(traffic.count),
                f"{traffic.seconds * 1e3:.2f}",
                _number(traffic.payload, 1e6),
                _number(traffic.bus_bandwidth, 1e9),
                _number(alone, 1e9),
            )
        for part, seconds, rate in _find_floors(case):
            table.add_row(part, clean(case.name), "", f"{seconds * 1e3:.2f}", "", "", rate)
        if roofline is not None:
            unit = f"TFLOP/s {_number(roofline.matmul, 1e12)}"
            table.add_row("matrix product alone", clean(case.name), "", "", "", "", unit)
            if roofline.experts is not None:
                unit = (
                    f"TFLOP/s {_number(roofline.experts, 1e12)}, {_share(roofline.experts, roofline.matmul)}"
                )
                table.add_row("experts alone", clean(case.name), "", "", "", "", unit)
    return table


def _make_work_table(cases: list[Measurement], console: Console) -> Table:
    table = _new_table(console, "work of rank 0", "case", "a step", "ms", "of all")
    for case in cases:
        whole = sum(work.seconds for work in case.work)
        for work in case.work:
            seconds = f"{work.seconds * 1e3:.2f}"
            table.add_row(work.kind, clean(case.name), str(work.count), seconds, _share(work.seconds, whole))
    return table


def _find_floors(case: Measurement) -> list[tuple[str, float, str]]:
    """Return (name, seconds, rate) of each lower bound on a step's time whose inputs are known."""
    roofline, step = case.roofline, case.step
    if roofline is None or step is None:
        return []
    found = []
    if case.flops is not None:
        rate = f"TFLOP/s {_number(roofline.matmul, 1e12)}"
        found.append(("floor of operations", case.flops * step.median / roofline.matmul, rate))
    if case.in_micro_batches is None or case.in_update is None:
        return found
    parts = (case.in_micro_batches, case.in_update)
    if roofline.copying is not None:
        moved = sum(part.traffic or 0 for part in parts)
        found.append(("floor of bytes", moved / roofline.copying, f"GB/s {_number(roofline.copying, 1e9)}"))
    if roofline.launch is not None:
        launches = sum(part.kernels for part in parts)
        rate = f"us {_number(roofline.launch, 1e-6)}"
        found.append(("floor of launches", launches * roofline.launch, rate))
    return found


def _count_work(case: Measurement) -> list[tuple[str, int]]:
    """Return per-step counts that bound the host: dispatched operations, and waits for device results."""
    if case.in_micro_batches is None or case.in_update is None:
        return []
    passes, update = case.in_micro_batches, case.in_update
    rows = [
        ("operations of all passes", passes.kernels),
        ("operations of the update", update.kernels),
        ("waits of the host in passes", passes.waits),
    ]
    return rows if case.device is None else [*rows, ("kernels, copies and fills", case.device.launches)]


def _number(value: float | None, unit: float) -> str:
    if value is None:
        return "-"
    shown = value / unit
    return f"{shown:.0f}" if abs(shown) >= 100 else f"{shown:.3g}"


def _share(part: float | None, whole: float | None) -> str:
    return "-" if part is None or not whole else f"{100 * part / whole:.0f} %"
