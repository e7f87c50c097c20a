"""Settings: what is refused, by name, value and bound; the density over the steps; k and its cap."""

from __future__ import annotations

import dataclasses
import math
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oktopk.settings import DENSE_ABOVE, LEAST_STAGES, Settings, entries_kept, falling_density, selection_cap


@pytest.mark.parametrize(
    ("name", "value", "bound"),
    [
        *[("density", value, "is not in (0, 1]") for value in (0.0, -0.1, 1.0001, math.nan, math.inf)],
        *[("first_density", value, "is not in (0, 0.25]") for value in (0.0, 0.2501, math.nan)],
        *[("balance_trigger", value, "is not >= 1") for value in (0.99, -1.0, math.nan)],
        *[("drift_tolerance", value, "is not in [0, 0.25]") for value in (-0.01, 0.26, math.nan)],
        *[
            (name, value, "is not an integer >= 1")
            for name in ("threshold_interval", "boundary_interval", "bucket_rounds")
            for value in (0, -1, 1.5, "8", True)
        ],
        *[
            (name, value, "is not an integer >= 0")
            for name in ("dense_warmup_steps", "density_warmup_steps")
            for value in (-1, 0.0, None, False)
        ],
        ("wire", "int2", "is not 'auto' or one of plain, float32, bfloat16, int8, int4"),
        ("exchange", "rows", "is not 'auto', 'direct' or 'grid'"),
        *[("nonfinite", value, "is not 'raise' or 'skip'") for value in ("ignore", "", None)],
        *[
            (name, 1, "is not True or False")
            for name in ("average", "deferred", "balanced_regions", "rotate")
        ],
    ],
)
def test_a_bad_value_is_refused_with_its_name_and_bound(name: str, value: Any, bound: str) -> None:
    message = f"{name} {value!r} {bound}"
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        Settings(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("density", value) for value in (1e-9, 0.25, 1, 1.0)],
        *[("balance_trigger", value) for value in (1, 1.0, math.inf)],
        *[("drift_tolerance", value) for value in (0, 0.25)],
        *[(name, 1) for name in ("threshold_interval", "boundary_interval", "bucket_rounds")],
        *[(name, 0) for name in ("dense_warmup_steps", "density_warmup_steps")],
        *[("nonfinite", value) for value in ("raise", "skip")],
    ],
)
def test_values_at_their_bounds_are_accepted(name: str, value: Any) -> None:
    assert getattr(Settings(**{name: value}), name) == value


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().density = 0.5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "densities"),
    [
        (Settings(0.02, dense_warmup_steps=3), [1.0] * 3 + [0.02] * 3),
        (
            Settings(DENSE_ABOVE / 81, dense_warmup_steps=2, density_warmup_steps=8),
            [
                1,
                1,
                *(DENSE_ABOVE / 3 ** (at // 2) for at in range(2 * LEAST_STAGES)),
                *[DENSE_ABOVE / 81] * 2,
            ],
        ),
        (  # where thresholds are exact
            Settings(0.0005, threshold_interval=10, density_warmup_steps=40, first_density=0.008),
            [*(0.008 / 2 ** (at // 10) for at in range(40)), 0.0005],
        ),
    ],
)
def test_density_is_one_then_falls_by_equal_stages_of_equal_ratio(
    settings: Settings, densities: list[float]
) -> None:
    assert [settings.density_at(step) for step in range(len(densities))] == pytest.approx(densities)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"first_density": 0.1},
            "first_density 0.1 is for steps in which it falls: set density_warmup_steps",
        ),
        (
            {"density": 0.1, "first_density": 0.01, "density_warmup_steps": 9},
            "first_density 0.01 is below density 0.1: nothing would fall",
        ),
    ],
)
def test_a_density_that_would_not_fall_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        Settings(**settings)


@given(st.floats(1e-6, 0.01), st.integers(1, 400), st.floats(1.01, 20), st.integers(1, 50))
def test_a_falling_density_has_the_mean_that_was_asked_for(
    mean: float, steps: int, fall: float, interval: int
) -> None:
    falling = falling_density(mean, steps, fall=fall, threshold_interval=interval)
    settings = Settings(threshold_interval=interval, **falling)
    assert np.mean([settings.density_at(step) for step in range(steps)]) == pytest.approx(mean)
    assert settings.density_at(0) == pytest.approx(fall * settings.density_at(steps))


def test_a_falling_density_takes_numbers_of_numpy() -> None:
    assert falling_density(np.float64(0.01), np.int64(90)) == falling_density(0.01, 90)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        *[({"steps": steps}, f"steps {steps!r} is not an integer >= 1") for steps in (0, 2.5, True, None)],
        *[
            ({"threshold_interval": n}, f"threshold_interval {n!r} is not an integer >= 1")
            for n in (0, -1, 2.5)
        ],
        *[({"fall": fall}, f"fall {fall!r} is not a number > 1") for fall in (1, math.nan, math.inf, "10")],
        *[({"mean": mean}, f"mean {mean!r} is not a number > 0") for mean in (0.0, -1, None, "0.01")],
        ({"mean": 0.2}, "mean 0.2 is too large: the first density would be 0.505, above 0.25"),
    ],
)
def test_a_falling_density_refuses_what_cannot_fall(wrong: dict[str, Any], sentence: str) -> None:
    arguments: dict[str, Any] = {"mean": 0.01, "steps": 3000} | wrong
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        falling_density(**arguments)


@given(st.floats(1e-6, 0.2), st.floats(1.01, 50), st.integers(0, 5), st.integers(1, 40), st.integers(1, 50))
def test_density_never_rises_and_ends_at_the_target(
    density: float, fall: float, dense: int, warmup: int, interval: int
) -> None:
    first = min(DENSE_ABOVE, density * fall)
    falls = {"dense_warmup_steps": dense, "density_warmup_steps": warmup, "first_density": first}
    settings = Settings(density, interval, **falls)  # type: ignore[arg-type]
    densities = [settings.density_at(step) for step in range(dense + warmup + 2)]
    assert densities == sorted(densities, reverse=True)
    assert densities[-2:] == [density, density]
    assert all(0 < value <= first for value in densities[dense:])
    assert len(set(densities[dense:-2])) >= min(LEAST_STAGES, warmup)


@pytest.mark.parametrize(
    ("density", "length", "k"),
    [
        *((0.01, 1, 1), (0.01, 100, 1), (0.01, 101, 2), (1, 7, 7), (0.25, 7, 2), (0.02, 14_728_266, 294_566)),
        # of the density as it is written
        *((0.07, 100, 7), (0.29, 100, 29), (0.01, 14_728_266, 147_283), (1e-9, 10, 1)),
    ],
)
def test_entries_kept(density: float, length: int, k: int) -> None:
    assert entries_kept(density, length) == k


@given(st.floats(1e-9, 1), st.integers(1, 2**31 - 1))
def test_entries_kept_is_at_least_one_and_at_most_all(density: float, length: int) -> None:
    assert 1 <= entries_kept(density, length) <= length
    assert entries_kept(density, length) >= Fraction(density) * length * (1 - Fraction(1, 2**52))


@given(st.integers(1, 2**31 - 1))
def test_the_cap_is_five_quarters_rounded_down(k: int) -> None:
    assert selection_cap(k) == 5 * k // 4
