"""Coefficient sets of the quintic Newton-Schulz step X <- a X + b (X X^T) X + c (X X^T)^2 X.

The sets, their four decimals and what follows after a set's last row are those of
emerging-optimizers 0.3, which is what Megatron's ``--optimizer muon`` runs, so that a run
switched to ``dmuon`` keeps its arithmetic.
"""

from typing import Literal, NamedTuple

Triple = tuple[float, float, float]
CoefficientSet = Literal["simple", "quintic", "polar_express", "cans", "aol", "deepseekv4"]


class _Set(NamedTuple):
    rows: tuple[Triple, ...]
    repeat_last: bool  # after the last row: repeat it, or start again with the first
    fp32_only: str | None = None  # why half precision is refused


_SETS: dict[str, _Set] = {
    # Keller Jordan's Muon, https://kellerjordan.github.io/posts/muon/
    "simple": _Set(((3.4445, -4.7750, 2.0315),), repeat_last=False),
    # YouJiacheng's rows in modded-nanogpt, found as described in
    # https://leloykun.github.io/ponder/muon-opt-coeffs/
    "quintic": _Set(
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        repeat_last=False,
    ),
    # Polar Express, arXiv 2505.16932; divided by (1.01, 1.01^3, 1.01^5) as its Algorithm 1 does,
    # but for the last row, which is the plain limit (15, -10, 3) / 8
    "polar_express": _Set(
        (
            (8.2051, -22.9019, 16.4607),
            (4.0664, -2.8612, 0.5184),
            (3.9096, -2.8234, 0.5250),
            (3.2856, -2.4153, 0.4853),
            (2.2779, -1.6198, 0.3985),
            (1.8726, -1.2307, 0.3585),
            (1.8564, -1.2132, 0.3568),
            (1.8750, -1.2500, 0.3750),
        ),
        repeat_last=True,
    ),
    # CANS, arXiv 2506.10935 (Remez on an adapted interval)
    "cans": _Set(
        (
            (8.4703, -25.1081, 18.6293),
            (4.1828, -3.1087, 0.5806),
            (3.9619, -2.9541, 0.5630),
            (3.2866, -2.4647, 0.5074),
            (2.2737, -1.6447, 0.4162),
        ),
        repeat_last=True,
        fp32_only="it diverges as soon as rounding lifts a singular value above 1",
    ),
    # https://github.com/thib-s/flash-newton-schulz; made for AOL's own rescaling of the rows.
    # After a Frobenius normalisation it flips the sign of the leading direction where
    # sigma_1 / norm > 0.884, in emerging-optimizers as here.
    "aol": _Set(
        (
            (4.0098, -7.0585, 2.4635),
            (3.4585, -5.5479, 2.5959),
            (2.7573, -3.2939, 1.4254),
            (2.7215, -3.0494, 1.3169),
        ),
        repeat_last=False,
        fp32_only="it turns the sign of singular values near 1, which rounding then decides",
    ),
    # DeepSeek-V4 report: eight steps of the simple set, then (2, -1.5, 0.5)
    "deepseekv4": _Set(
        ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2,
        repeat_last=True,
    ),
}

COEFFICIENT_SETS: tuple[str, ...] = tuple(_SETS)


def coefficient_schedule(name: CoefficientSet, steps: int) -> list[Triple]:
    """The ``steps`` coefficient rows (a, b, c) of the named set.

    Where ``steps`` exceeds the set's rows, polar_express, cans and deepseekv4 repeat the last row
    and simple, quintic and aol start again with the first. Raises ValueError for an unknown name
    or ``steps`` below 1.
    """
    chosen = _lookup(name)
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps} (--muon-num-ns-steps)")
    rows, last = chosen.rows, len(chosen.rows) - 1
    if chosen.repeat_last:
        return [rows[min(i, last)] for i in range(steps)]
    return [rows[i % len(rows)] for i in range(steps)]


def half_precision_refusal(name: CoefficientSet) -> str | None:
    """Why the named set must not run in bf16, fp16 or tf32; None where it may."""
    return _lookup(name).fp32_only


def _lookup(name: str) -> _Set:
    if name not in _SETS:
        raise ValueError(
            f"unknown coefficient set {name!r} (--muon-coefficient-type); "
            f"choose one of {', '.join(COEFFICIENT_SETS)}"
        )
    return _SETS[name]
