"""Coefficient sets: the values of emerging-optimizers, also beyond a set's last row."""

import pytest
import torch

from dmuon_megatron.orthogonalize import COEFFICIENT_SETS, coefficient_schedule, orthogonalize

SIMPLE = (3.4445, -4.7750, 2.0315)
QUINTIC = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]
POLAR_EXPRESS = [
    (8.2051, -22.9019, 16.4607),
    (4.0664, -2.8612, 0.5184),
    (3.9096, -2.8234, 0.5250),
    (3.2856, -2.4153, 0.4853),
    (2.2779, -1.6198, 0.3985),
    (1.8726, -1.2307, 0.3585),
    (1.8564, -1.2132, 0.3568),
    (1.8750, -1.2500, 0.3750),
]
CANS = [
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
]
AOL = [
    (4.0098, -7.0585, 2.4635),
    (3.4585, -5.5479, 2.5959),
    (2.7573, -3.2939, 1.4254),
    (2.7215, -3.0494, 1.3169),
]
DEEPSEEK = [SIMPLE] * 8 + [(2.0, -1.5, 0.5)] * 2


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("simple", [SIMPLE] * 12),
        ("quintic", QUINTIC + QUINTIC + QUINTIC[:2]),
        ("polar_express", POLAR_EXPRESS + POLAR_EXPRESS[-1:] * 4),
        ("cans", CANS + CANS[-1:] * 7),
        ("aol", AOL * 3),
        ("deepseekv4", DEEPSEEK + DEEPSEEK[-1:] * 2),
    ],
)
def test_twelve_steps_of_every_set(name, expected):
    assert coefficient_schedule(name, 12) == expected
    assert coefficient_schedule(name, 3) == expected[:3]


def test_no_set_is_left_out_above():
    assert COEFFICIENT_SETS == ("simple", "quintic", "polar_express", "cans", "aol", "deepseekv4")


def test_same_rows_as_emerging_optimizers():
    utils = pytest.importorskip("emerging_optimizers.orthogonalized_optimizers.muon_utils")
    assert set(utils._COEFFICIENT_SETS) == set(COEFFICIENT_SETS)
    for name, rows in utils._COEFFICIENT_SETS.items():
        # the choice of mode stands inside its newton_schulz; the test below runs that
        repeats = name in ("polar_express", "cans", "deepseekv4")
        mode = "repeat_last" if repeats else "cycle"
        theirs = list(utils.get_coefficient_iterator(12, rows, mode))
        assert coefficient_schedule(name, 12) == theirs


@pytest.mark.parametrize("name", COEFFICIENT_SETS)
@pytest.mark.parametrize("steps", [1, 4, 11])
def test_same_result_as_emerging_optimizers_in_fp32(name, steps):
    utils = pytest.importorskip("emerging_optimizers.orthogonalized_optimizers.muon_utils")
    x = torch.randn(24, 40, generator=torch.Generator().manual_seed(steps))
    theirs = utils.newton_schulz(x, steps, name)
    ours = orthogonalize(x, method="standard", coefficients=name, steps=steps)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_unknown_name_or_no_step_is_refused_with_the_flag():
    with pytest.raises(ValueError, match=r"--muon-coefficient-type.*quintic"):
        coefficient_schedule("cubic", 5)
    with pytest.raises(ValueError, match="--muon-num-ns-steps"):
        coefficient_schedule("quintic", 0)


@pytest.mark.parametrize("name", ["cans", "aol"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sets_that_half_precision_breaks_are_refused(name, dtype):
    with pytest.raises(ValueError, match="--muon-fp32-matmul-prec highest"):
        orthogonalize(torch.randn(32, 64), coefficients=name, dtype=dtype)


def test_sets_that_half_precision_breaks_are_refused_in_tf32():
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(ValueError, match="exact float32"):
            orthogonalize(torch.randn(32, 64), coefficients="cans")
    finally:
        torch.set_float32_matmul_precision("highest")


def test_rows_may_be_given():
    x = torch.randn(20, 30)
    named = orthogonalize(x, coefficients="quintic", steps=3)
    assert torch.equal(named, orthogonalize(x, coefficients=QUINTIC, steps=3))
    with pytest.raises(ValueError, match="5 rows for steps=6"):
        orthogonalize(x, coefficients=QUINTIC, steps=6)
