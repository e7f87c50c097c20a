from __future__ import annotations

import itertools
import math
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from jobs.config.config import Config
from jobs.config.file import (
    ConfigError,
    apply_overrides,
    commented_toml,
    key_comment,
    load,
    read_toml,
    shown,
    validate,
)
from jobs.config.sections import ScheduleConfig
from jobs.train.optimizers import learning_rate_factor

CONFIGS = Path(__file__).parents[3] / "jobs" / "configs"
SMALLEST = {"training": {"steps": 3}}


def with_overrides(*overrides: str) -> Config:
    return validate(apply_overrides(SMALLEST, overrides))


PAPER: dict[str, dict[str, dict[str, object]]] = {
    "vgg.toml": {
        "model": {"width": 1.0},
        "training": {"batch_size": 16, "epochs": 161},
        "optimizer": {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4},
        "schedule": {"warmup": 10, "milestones": (81, 122, 155)},
        "reduction": {
            "density": 0.02,
            "threshold_interval": 32,
            "boundary_interval": 64,
            "dense_warmup_steps": 512,
        },
    },
    "lstm.toml": {
        "model": {"width": 1.0},
        "training": {"batch_size": 2},
        "optimizer": {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-4, "clip_norm": 400.0},
        "schedule": {"name": "exponential", "unit": "epochs", "gamma": 1 / 1.01},
        "reduction": {
            "density": 0.02,
            "threshold_interval": 32,
            "boundary_interval": 64,
            "dense_warmup_steps": 128,
        },
    },
    "bert.toml": {
        "model": {"layers": 12, "hidden": 768, "vocabulary": 30_522},
        "training": {"batch_size": 8},
        "optimizer": {"name": "adamw", "bias_correction": False, "lr": 2e-4, "weight_decay": 0.01}
        | {"beta1": 0.9, "beta2": 0.999, "eps": 1e-6},
        "schedule": {"name": "linear", "unit": "run", "warmup": 0.1},
        "reduction": {"density": 0.01, "threshold_interval": 128, "boundary_interval": 64},
    },
}


@pytest.mark.parametrize("file", PAPER)
def test_a_shipped_file_has_the_papers_settings(file: str) -> None:
    with pytest.raises(ConfigError, match=re.escape("[data] path is empty")):
        load(CONFIGS / file)
    shipped = load(CONFIGS / file, ["data.path=x.h5"]).model_dump()
    for section, expected in PAPER[file].items():
        assert {key: shipped[section][key] for key in expected} == expected


def test_a_config_shown_as_toml_reads_back_equal() -> None:
    config = with_overrides(
        "run.file='runs/gr\u00fc\u00df \U0001f40d \"quoted\".h5'",
        "schedule.name=step",
        "schedule.milestones=[2, 3.5]",
        "optimizer.eps=1e-12",
        "schedule.warmup_start='1/ranks'",
        "model.factory=my.nets:build",
        "model.arguments={sizes = [3, 4], 'a b' = {deep = true}}",
        "model.arguments.rate=1e-3",
    )
    assert config.model.arguments == {"sizes": [3, 4], "a b": {"deep": True}, "rate": 1e-3}
    assert validate(tomllib.loads(commented_toml(config.model_dump()))) == config
    assert Config.model_validate_json(config.to_json()) == config


def test_every_key_is_shown_with_its_meaning_type_and_default() -> None:
    text = commented_toml(shown(None, []))
    lines = text.splitlines()
    sections = tomllib.loads(text)
    for name, section in Config.model_fields.items():
        keys = section.annotation.model_fields
        assert set(sections[name]) == set(keys)
        start = lines.index(f"[{name}]")
        for key, field in keys.items():
            at = next(at for at in range(start, len(lines)) if lines[at].startswith(f"{key} = "))
            assert lines[at - 1] == f"# {key_comment(field)}"
    density = lines[lines.index("density = 0.01") - 1]
    assert density.startswith("# Share of the entries that is applied per step, in (0, 1]; k = ")
    assert density.endswith(" (number; default 0.01)")
    steps = lines[lines.index("batch_size = 16") - 1]
    assert steps == "# Samples per rank and backward pass (integer, >= 1; default 16)"
    warmup_start = lines[lines.index("warmup_start = 0.0") - 1]
    assert warmup_start.endswith('in [0, 1] (number or "1/ranks"; default 0.0)')


def test_without_a_file_the_defaults_are_shown() -> None:
    assert shown(None, ["optimizer.lr=0.5"])["training"]["steps"] == 0
    assert shown(None, ["training.steps=7"])["training"]["steps"] == 7
    assert shown(None, ["model.factory=a:b"])["model"]["name"] == "own"
    assert shown(str(CONFIGS / "digits.toml"), ["optimizer.lr=0.5"])["optimizer"]["lr"] == 0.5
    with pytest.raises(ConfigError, match=r"did you mean lr\?"):
        shown(None, ["optimizer.lrr=0.5"])


def test_ones_own_network_trains_on_what_the_data_set_is() -> None:
    own = FACTORY
    assert with_overrides(own).task == "images"
    assert with_overrides(own, "data.name=an4", "data.path=x.h5").task == "speech"
    assert with_overrides(own, "data.name=text", "data.path=x.h5").task == "text"
    assert with_overrides(own).model.factory == "my.nets:build"


def test_overrides_are_toml_and_fall_back_to_strings() -> None:
    config = with_overrides(
        "training.steps=7",
        "training.steps = 8",
        "reduction.method=dense",
        "run.file=runs/a-b.h5",
        "run.overwrite=true",
        "optimizer.lr=1e-3",
    )
    assert config.training.steps == 8
    assert (config.reduction.method, config.run.file, config.run.overwrite) == ("dense", "runs/a-b.h5", True)
    assert config.optimizer.lr == 1e-3


def test_an_override_cannot_smuggle_in_a_second_key() -> None:
    assert with_overrides("run.file='a'\nvalue2 = 1").run.file == "'a'\nvalue2 = 1"


def test_overrides_leave_the_document_alone() -> None:
    apply_overrides(SMALLEST, ["training.steps=4"])
    assert SMALLEST == {"training": {"steps": 3}}


@pytest.mark.parametrize("override", ["training.steps", "steps=3", "=3", ".steps=3", "training.=3", ""])
def test_a_malformed_override_is_named(override: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"--set {override}: expected section.key=value")):
        apply_overrides(SMALLEST, [override])


FACTORY = "model.factory=my.nets:build"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.factory=build"], 'model.factory = "build": String should match pattern'),
        (["model.factory=my nets:build"], "String should match pattern"),
        ([FACTORY, "model.name=bert"], "name 'bert' and a factory are two networks"),
        ([FACTORY, "model.width=0.5"], "width 0.5 is for vgg16 and lstm, not for own"),
        (["model.name=own"], "name 'own' needs a factory"),
        (["model.arguments.width=3"], "arguments {'width': 3} is for own, not for vgg16"),
        ([FACTORY, "model.arguments.day=2026-01-01"], "not a valid JSON value"),
        ([FACTORY, "model.arguments.x=nan"], "should be a finite number"),
        ("training.steps.more=3", "--set training.steps.more=3: steps is not a table"),
        (
            "reduction.densty=0.01",
            "reduction.densty: unknown key in [reduction] (did you mean density?); valid: method, ",
        ),
        ("reducton.density=0.01", "reducton: unknown section (did you mean reduction?); valid: model, data,"),
        ("reduction.density=0", "[reduction] density 0.0 is not in (0, 1]"),
        ("reduction.density=1.5", "[reduction] density 1.5 is not in (0, 1]"),
        ("reduction.threshold_interval=0", "[reduction] threshold_interval 0 is not"),
        ("reduction.method=dense-ovlp", "'dense-ovlp' is overlap = true with method 'dense', on GPUs method"),
        ("reduction.method=okotpk", "reduction.method = \"okotpk\": 'okotpk' is not one of dense, "),
        ("training.batch_size=0", "training.batch_size = 0: Input should be greater than or equal to 1"),
        ("training.batch_size=16.0", "training.batch_size = 16.0: Input should be a valid integer"),
        ("training.steps=0", "[training] steps and epochs are both 0"),
        ("optimizer.lr=inf", "optimizer.lr = Infinity: Input should be a finite number"),
        ("optimizer.nesterov=true", "[optimizer] nesterov needs a momentum above 0"),
        ("schedule.warmup_start=2", "schedule.warmup_start = 2: Input should be less than or equal to 1; or"),
        ("schedule.warmup_start=half", "Input should be a valid number; or Input should be '1/ranks'"),
        ("schedule.milestones=[1]", "[schedule] milestones (1.0,) is for step, not for constant"),
        ("model.patch=8", "[model] patch 8 is for vit, not for vgg16"),
        ("model.layers=3", "[model] layers 3 is for bert and gpt and vit, not for vgg16"),
        ("data.tempo=[0.9,1.1]", "[data] tempo (0.9, 1.1) is for an4, not for images"),
        ("schedule.name=step", "[schedule] the schedule 'step' needs milestones"),
        ("data.path=x.h5", "[data] path is 'x.h5', but digits are read from no file"),
        ("data.name=cifar10", "[data] path is empty, but the data set 'cifar10' is read from a file"),
        ("run.file=''", 'run.file = "": String should have at least 1 character'),
        ("run.file=a\0b", 'run.file = "a\\u0000b": a name cannot hold a NUL character'),
        ("run.file=a\udcff", "unable to parse raw data as a unicode string"),
        ("training.threads=100000000000", "training.threads = 100000000000: Input should be less than or"),
        (f"training.eval_every={10**30}", f"training.eval_every = {10**30}: an integer has 64 bits at most"),
        (f"training.steps={'[' * 5000}", 'training.steps = "[[['),
    ],
)
def test_a_bad_value_names_itself_and_the_bound(overrides: str | list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_overrides(*([overrides] if isinstance(overrides, str) else overrides))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["dense_warmup_steps", "density_warmup_steps"])
def test_a_start_of_updates_ends_within_the_run(name: str) -> None:
    """An exchange in two steps: three in five steps."""
    words = [
        "reduction.sends=updates",
        "reduction.deferred=false",
        "optimizer.name=adamw",
        "optimizer.momentum=0",
    ]
    words += ["reduction.every=2", "reduction.method=union", "training.steps=5"]
    with_overrides(*words, f"reduction.{name}=3")
    with pytest.raises(ConfigError, match=f"{name} 4 is more than the run's exchanges: training.steps is 5"):
        with_overrides(*words, f"reduction.{name}=4")


def test_every_fault_has_its_line() -> None:
    with pytest.raises(ConfigError) as caught:
        with_overrides("model.width=0", "training.seed=-1", "run.fil=x")
    assert [line.split(" ")[0] for line in str(caught.value).splitlines()] == [
        "model.width",
        "training.seed",
        "run.fil:",
    ]


def test_a_section_missing_or_of_the_wrong_kind_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^training is missing$"):
        validate({})
    with pytest.raises(ConfigError, match=r"^\[training\] Input should be"):
        validate({"training": 3})


def test_a_file_that_is_missing_or_no_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path / 'none.toml'}: No such file")):
        load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path)
    broken = tmp_path / "broken.toml"
    broken.write_text("[training]\nsteps 3\n")
    with pytest.raises(ConfigError, match=r"broken.toml is not TOML: .*line 2"):
        read_toml(broken)
    broken.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not TOML"):
        read_toml(broken)
    with pytest.raises(ConfigError, match="is not TOML: embedded null byte"):
        load("a\0b")
    for deep in ("x = " + "[" * 5000, ".".join("a" * 5000) + " = 1"):
        broken.write_text(f"[schedule]\nmilestones.{deep}\n")
        with pytest.raises(ConfigError, match=r"broken.toml is nested too deeply"):
            load(broken)


def factor(
    step: int, *, ranks: int = 4, steps: int = 100, steps_per_epoch: int = 10, **keys: object
) -> float:
    schedule = ScheduleConfig.model_validate(keys)
    return learning_rate_factor(schedule, step, steps=steps, steps_per_epoch=steps_per_epoch, ranks=ranks)


MILESTONES = {"name": "step", "milestones": [2, 5], "gamma": 0.1, "unit": "epochs"}


@pytest.mark.parametrize(
    ("keys", "factors"),
    [
        ({}, dict.fromkeys(range(100), 1.0)),
        ({"warmup": 5}, {0: 0.2, 1: 0.4, 2: 0.6, 3: 0.8, 4: 1.0, 5: 1.0, 6: 1.0}),
        ({"warmup": 3, "warmup_start": "1/ranks"}, {0: 0.5, 1: 0.75, 2: 1.0}),
        ({"warmup": 3, "warmup_start": "1/ranks", "ranks": 1}, {0: 1.0}),
        ({"name": "exponential", "gamma": 0.5, "unit": "epochs"}, {0: 1.0, 9: 1.0, 10: 0.5, 29: 0.25}),
        (
            {"name": "linear", "unit": "run", "warmup": 0.1},
            {0: 0.1, 8: 0.9, 9: 1.0, 10: 1.0, 11: 1 - 1 / 89, 99: 0.0},
        ),
        (MILESTONES, {0: 1.0, 19: 1.0, 20: 0.1, 49: 0.1, 50: 0.01, 99: 0.01}),
    ],
)
def test_a_schedule_gives_these_factors(keys: dict[str, Any], factors: dict[int, float]) -> None:
    assert {step: factor(step, **keys) for step in factors} == pytest.approx(factors)


def test_one_cycle_rises_and_falls_along_cosines() -> None:
    keys = {"name": "one-cycle", "warmup": 30, "warmup_start": 0.2}
    rates = [factor(step, **keys) for step in range(100)]
    assert rates[29] == max(rates) == 1.0
    assert rates[0] == pytest.approx(0.2, abs=0.01)
    assert rates[-1] == pytest.approx(0.0, abs=1e-12)
    assert all(after > before for before, after in itertools.pairwise(rates[:30]))
    assert all(after < before for before, after in itertools.pairwise(rates[30:]))
    assert rates[14] == pytest.approx(0.6)  # half-way up, half the rise
    with pytest.raises(ValueError, match="'one-cycle' needs a warmup"):
        ScheduleConfig(name="one-cycle")


@pytest.mark.parametrize("name", ["cosine", "linear"])
@pytest.mark.parametrize("final", [0.0, 0.1])
def test_a_decay_ends_at_its_final_factor(name: str, final: float) -> None:
    rates = [factor(step, name=name, warmup=10, final=final) for step in range(10, 100)]
    assert rates[0] == 1.0
    assert rates[-1] == pytest.approx(final, abs=1e-12)
    assert all(after < before for before, after in itertools.pairwise(rates))


@pytest.mark.parametrize("name", ["constant", "exponential", "cosine", "linear"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_shortest_runs_have_a_finite_rate(name: str, steps: int) -> None:
    for warmup in (0, 1, 2.5, 10):
        rates = [factor(step, steps=steps, name=name, warmup=warmup) for step in range(steps)]
        assert all(math.isfinite(rate) and 0 <= rate <= 1 for rate in rates)


def test_training_modes_are_methods_without_what_they_cannot_do() -> None:
    for mode in ("nccl", "ddp"):
        assert with_overrides(f"reduction.method={mode}").reduction.method == mode
        for override in (
            "reduction.sends=updates",
            "reduction.every=2",
            "reduction.nonfinite=skip",
            "reduction.average=false",
            "reduction.wire=int8",
            "run.measure_every=7",
        ):
            key = override.partition("=")[0]
            with pytest.raises(ConfigError, match=f"{key}.* is not for reduction.method '{mode}'"):
                with_overrides(f"reduction.method={mode}", override)


def test_overlap_is_for_methods() -> None:
    for method in ("dense", "oktopk"):
        assert with_overrides(f"reduction.method={method}", "reduction.overlap=true").reduction.overlap
    for method, instead in (("ddp", ""), ("nccl", ": its like is 'ddp'")):
        with pytest.raises(ConfigError, match=f"for the methods of oktopk, not for '{method}'{instead}$"):
            with_overrides(f"reduction.method={method}", "reduction.overlap=true")
