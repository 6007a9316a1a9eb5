"""A `Profile` as text: a few lines, and tables in Markdown, which reads well on a terminal too."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from shoal.bench.show import markdown_table, number
from shoal.planner.profile import Attention, Curve, Matmul, Profile, interpolate

US, MS, GIGA = 1e6, 1e3, 1e-9
SHOWN_BYTES = (64 * 1024, 1024**2, 16 * 1024**2, 256 * 1024**2)


def describe_profile(profile: Profile) -> str:
    """What a person wants to know of a device."""
    host, beside = profile.host, profile.beside
    lines = [
        f"device   {profile.devices} x {profile.name} ({profile.device}); {profile.about}",
        *_matmul_lines(profile.matmuls),
        *_attention_lines(profile.attention),
        f"moves    {_moves(profile.moves)}",
        f"host     operator {number(host.operator_s, 1, US)} us, compiled kernel {number(host.kernel_s, 1, US)}, compiled graph "
        f"{number(host.graph_s, 1, US)}, collective {number(host.collective_s, 1, US)}",
    ]
    if profile.host_copies:
        lines.insert(-1, f"copies   {_moves(profile.host_copies)} from the host")
    if max(beside.computing, beside.collectives) > 1:  # else it was not measured
        lines.append(
            f"beside   computing takes {number(beside.computing, 2)} times as long beside a collective, a collective "
            f"{number(beside.collectives, 2)} times beside computing"
        )
    tables = [_collectives(profile.collectives)] if profile.collectives else []
    return "\n\n".join(["\n".join(lines), *tables])


def _matmul_lines(matmuls: Iterable[Matmul]) -> Iterable[str]:
    by_dtype: dict[str, list[Matmul]] = {}
    for matmul in matmuls:
        by_dtype.setdefault(matmul.dtype, []).append(matmul)
    for dtype, some in by_dtype.items():
        best = max(some, key=_rate)
        yield (
            f"matmul   {dtype}: up to {_flops(_rate(best))} ({best.m} x {best.n} x {best.k}), half of {len(some)} shapes above "
            f"{_flops(statistics.median(map(_rate, some)))}"
        )


def _rate(matmul: Matmul) -> float:
    return 2 * matmul.m * matmul.n * matmul.k / matmul.seconds


def _flops(rate: float) -> str:
    return f"{number(rate, 1, 1e-12)} TFLOP/s" if rate >= 1e12 else f"{number(rate, 1, 1e-9)} GFLOP/s"


def _attention_lines(attention: Sequence[Attention]) -> Iterable[str]:
    if not attention:
        return
    longest = max(attention, key=_attention_flops)
    forward = _attention_flops(longest) / longest.forward_s
    backward = 2.5 * _attention_flops(longest) / longest.backward_s
    yield (
        f"attention {longest.dtype}: forward {_flops(forward)}, backward {_flops(backward)} ({longest.batch} x {longest.heads} "
        f"heads of {longest.width}, {longest.length} long; {len(attention)} shapes)"
    )


def _attention_flops(attention: Attention) -> float:
    """Forward, of a causal mask's half: two products; backward has five, 2.5 times as many operations."""
    return 2 * attention.batch * attention.heads * attention.length**2 * attention.width


def _moves(curve: Curve) -> str:
    (small, least), (large, most) = curve[0], curve[-1]
    return f"{number(large / most, 1, GIGA)} GB/s ({shown_bytes(large)}), {number(least, 1, US)} us for {shown_bytes(small)}"


def _collectives(collectives: dict[str, Curve]) -> str:
    """Milliseconds at some sizes that were measured, and bytes of the largest by its time."""
    most = max(curve[-1][0] for curve in collectives.values())
    sizes = [size for size in SHOWN_BYTES if size <= most * 1.01]
    header = ["collective/ranks", *(f"{shown_bytes(size)}, ms" for size in sizes), "GB/s of the largest"]
    lines = []
    for name, curve in collectives.items():
        largest, seconds = curve[-1]
        times = [number(interpolate(curve, size), 3, MS) for size in sizes]
        lines.append([name, *times, number(largest / seconds, 2, GIGA)])
    return markdown_table(header, lines)


def shown_bytes(size: float) -> str:
    """A size in the largest unit in which it is at least one.

    Example:
        >>> shown_bytes(32768), shown_bytes(1 << 30)
        ('32 KiB', '1 GiB')
    """
    for unit, name in ((1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB")):
        if size >= unit:
            return f"{size / unit:.0f} {name}"
    return f"{size:.0f} B"
