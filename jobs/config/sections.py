"""The sections of a training run's configuration: every key with its type, its bounds and its default.

Those of the reduction have their defaults in oktopk.Settings.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from jobs.config.modes import TRAINING_MODES
from oktopk import METHODS, Settings


class Section(BaseModel):
    """Keys that are typed, known and never change."""

    # strict: "16" is not 16. A string that reads as a number is more often a slip than an intention.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _fits_a_system_call(cls, value: Any) -> Any:
        if isinstance(value, str):
            value.encode()  # a file name in another encoding raises ValueError
            if "\0" in value:
                raise ValueError("a name cannot hold a NUL character")
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError("an integer has 64 bits at most")
        return value


_FACTORY = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


class ModelConfig(Section):
    """The network. Keys of another network than `name` are refused.

    With `factory` the network is one's own. It trains on what the data set needs: images, speech (`an4`) or text.
    """

    name: Literal["vgg16", "lstm", "bert", "own"] = Field(
        default="vgg16", description="the network; own: the one that factory makes"
    )
    width: float = Field(
        default=1.0,
        gt=0.0,
        le=8.0,
        description="vgg16 and lstm: what every layer's channels are multiplied with",
    )
    layers: int = Field(default=12, ge=1, description="bert: layers of the encoder")
    hidden: int = Field(default=768, ge=64, multiple_of=64, description="bert: channels, 64 to a head")
    dropout: float = Field(
        default=0.1, ge=0.0, lt=1.0, description="bert: probability of the dropout in every layer"
    )
    vocabulary: int = Field(
        default=0, ge=0, description="bert: words that the text file must have; 0: as many as it has"
    )
    factory: str = Field(
        default="",
        description='own: "my_package.my_module:build", a callable that returns a torch.nn.Module; name is then "own"',
    )
    arguments: dict[str, Any] = Field(
        default_factory=dict,
        description="own: keywords that factory is called with, a table [model.arguments]",
    )

    _OWNERS: ClassVar[dict[str, tuple[str, ...]]] = {
        "width": ("vgg16", "lstm"),
        **dict.fromkeys(("layers", "hidden", "dropout", "vocabulary"), ("bert",)),
        **dict.fromkeys(("factory", "arguments"), ("own",)),
    }

    @model_validator(mode="before")
    @classmethod
    def _a_factory_makes_ones_own(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("factory"):
            return {"name": "own", **values}
        return values

    @field_validator("factory")
    @classmethod
    def _names_a_callable(cls, value: str) -> str:
        if value and not _FACTORY.fullmatch(value):
            raise ValueError('it is not of the form "my_package.my_module:build"')
        return value

    @field_validator("arguments")
    @classmethod
    def _is_on_record_as_json(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key, argument in value.items():
            if not _is_json(argument):
                raise ValueError(f"{key} is not made of strings, finite numbers, booleans, lists and tables")
        return value

    @model_validator(mode="after")
    def _keys_are_its_own(self) -> Self:
        if self.factory and self.name != "own":
            raise ValueError(
                f"name {self.name!r} and a factory are two networks: leave one out, or set name to 'own'"
            )
        for key, owners in self._OWNERS.items():
            default = type(self).model_fields[key].get_default(call_default_factory=True)
            if self.name not in owners and getattr(self, key) != default:
                raise ValueError(f"{key} is for {' and '.join(owners)}, not for {self.name}")
        if self.name == "own" and not self.factory:
            raise ValueError("name 'own' needs a factory")
        return self

    @property
    def description(self) -> str:
        if self.name == "bert":
            return f"bert of {self.layers} layers of {self.hidden}"
        return self.factory or f"{self.name} of width {self.width}"


def _is_json(value: Any) -> bool:
    if isinstance(value, dict | list):
        return all(map(_is_json, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))


class DataConfig(Section):
    """What is trained on. `digits` needs no file; the others are read from `path`, written by data.prepare.

    `an4` is for lstm and `text` for bert, all others are images.
    """

    name: Literal["digits", "cifar10", "prepared", "an4", "text"] = Field(
        default="digits", description="the data set; prepared: images of any other"
    )
    path: str = Field(default="", description="file that data.prepare wrote; none for the digits")
    size: int = Field(default=32, ge=32, le=512, description="pixels per side of the digits")
    held_out: float = Field(
        default=0.5, gt=0.0, lt=1.0, description="fraction of the digits that is never trained on"
    )
    crop: int = Field(
        default=0, ge=0, description="pixels of padding that training images are cropped from at random"
    )
    flip: bool = Field(default=False, description="mirror training images at random; not for digits")
    tempo: tuple[float, ...] = Field(
        default=(),
        strict=False,
        description="[least, most] factor on the tempo of a training utterance, its spectrogram resampled along time; "
        "empty: as it was said",
    )
    eval_sequences: int = Field(
        default=0,
        ge=0,
        description="text: held-out sequences that an evaluation takes, spread evenly over all of them; 0: all",
    )

    @field_validator("tempo")
    @classmethod
    def _is_a_range(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if value and not (len(value) == 2 and 0.5 <= value[0] <= value[1] <= 2.0):
            raise ValueError(f"{list(value)} is not [least, most] within [0.5, 2]")
        return value

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> Self:
        if self.name != "digits" and not self.path:
            raise ValueError(
                f"path is empty, but the data set {self.name!r} is read from a file: "
                "write one with data.prepare"
            )
        if self.name == "digits" and self.path:
            raise ValueError(
                f"path is {self.path!r}, but digits are read from no file: set data.name to 'prepared'"
            )
        owned = {"crop": "images", "flip": "images", "eval_sequences": "text", "tempo": "an4"}
        kind = self.name if self.name in ("an4", "text") else "images"
        for key, owner in owned.items():
            if owner != kind and (value := getattr(self, key)):
                raise ValueError(f"{key} is {value}, which is not for the data set {self.name!r}")
        return self


class OptimizerConfig(Section):
    """The torch optimizer that sees the reduced, averaged gradient."""

    name: Literal["sgd", "adam", "adamw"] = Field(default="sgd", description="torch's optimizer of that name")
    lr: float = Field(default=0.1, gt=0.0, description="learning rate, which the schedule multiplies")
    momentum: float = Field(
        default=0.0, ge=0.0, lt=1.0, description="sgd only: momentum of the reduced gradient"
    )
    nesterov: bool = Field(default=False, description="sgd only: Nesterov's momentum")
    weight_decay: float = Field(
        default=0.0,
        ge=0.0,
        description="factor of the parameters; part of the gradient, for adamw apart from it",
    )
    beta1: float = Field(
        default=0.9, ge=0.0, lt=1.0, description="adam and adamw only: decay of the gradient's running mean"
    )
    beta2: float = Field(
        default=0.999, ge=0.0, lt=1.0, description="adam and adamw only: decay of its square's running mean"
    )
    eps: float = Field(
        default=1e-8, gt=0.0, description="adam and adamw only: added to the root of that mean"
    )
    bias_correction: bool = Field(
        default=True, description="adamw only; false: the running means keep their start from zero"
    )
    decay_vectors: bool = Field(
        default=True, description="whether weight_decay is for biases and the weights of norms as well"
    )
    clip_norm: float = Field(
        default=0.0,
        ge=0.0,
        description="Euclidean norm that the reduced gradient is scaled down to, equal on all ranks; 0: never",
    )

    @model_validator(mode="after")
    def _momentum_is_used(self) -> Self:
        if self.name != "sgd" and (self.momentum or self.nesterov):
            raise ValueError(f"momentum {self.momentum} and nesterov are for sgd, not for {self.name}")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")
        if not self.bias_correction and self.name != "adamw":
            raise ValueError(f"bias_correction false is for adamw, not for {self.name}")
        return self


class ScheduleConfig(Section):
    """The learning rate over the run, as a factor of optimizer.lr, set at every step.

    warmup and milestones count in `unit`, of which "run" is the whole run. The warm-up rises linearly from
    warmup_start (a fraction, or "1/ranks") to 1; then `step` multiplies by gamma at each milestone and
    `exponential` after each unit of the run, `cosine` and `linear` fall to `final` at the last step. `one-cycle` is
    `cosine` with a warm-up along a cosine.
    """

    name: Literal["constant", "step", "exponential", "cosine", "linear", "one-cycle"] = Field(
        default="constant", description="the learning rate's course after the warm-up"
    )
    unit: Literal["steps", "epochs", "run"] = Field(
        default="steps", description="what warmup and milestones count in; run: shares of the whole run"
    )
    warmup: float = Field(default=0.0, ge=0.0, description="length of the linear rise at the start")
    warmup_start: float | Literal["1/ranks"] = Field(
        default=0.0, description="factor that the rise starts from, in [0, 1]"
    )
    milestones: tuple[float, ...] = Field(
        default=(), strict=False, description="step only: where the rate is multiplied by gamma, ascending"
    )
    gamma: float = Field(
        default=0.1, gt=0.0, le=1.0, description="step and exponential only: what the rate is multiplied by"
    )
    final: float = Field(
        default=0.0, ge=0.0, le=1.0, description="cosine, linear and one-cycle only: factor at the last step"
    )

    @field_validator("warmup_start")
    @classmethod
    def _is_a_fraction(cls, value: float | str) -> float | str:
        if not isinstance(value, str) and not 0.0 <= value <= 1.0:
            raise ValueError(f"{value} is not in [0, 1]")
        return value

    @model_validator(mode="after")
    def _milestones_ascend(self) -> Self:
        if any(b <= a for a, b in zip(self.milestones, self.milestones[1:], strict=False)):
            raise ValueError(f"milestones {list(self.milestones)} do not ascend")
        if self.milestones and self.name != "step":
            raise ValueError(f"milestones are for the schedule 'step', not for {self.name!r}")
        if self.name == "step" and not self.milestones:
            raise ValueError("the schedule 'step' needs milestones")
        if self.name == "one-cycle" and not self.warmup:
            raise ValueError("the schedule 'one-cycle' needs a warmup")
        if self.unit == "run" and self.warmup > 1.0:
            raise ValueError(f"a warmup of {self.warmup} runs is not in [0, 1]")
        return self


def _described(docstring: str) -> dict[str, str]:
    """The first sentence of each attribute in a docstring of Google's form."""
    entries = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", docstring, re.MULTILINE)
    return {name: " ".join(text.split()).split(". ")[0].rstrip(".") for name, text in entries}


_SETTINGS = _described(Settings.__doc__ or "")


def _setting(name: str) -> Any:
    """A key with the default and the description that it has in oktopk.Settings."""
    return Field(default=getattr(Settings, name), description=_SETTINGS.get(name))


class ReductionConfig(Section):
    """How gradients are summed over the ranks: `method` is one of oktopk.METHODS or of TRAINING_MODES.

    The keys besides `method`, `gradient_type` and `bucket_mb` are those of oktopk.Settings, and for oktopk.METHODS.
    """

    method: str = Field(
        default="oktopk",
        description=f"how gradients are summed: {', '.join([*sorted(METHODS), *TRAINING_MODES])}",
    )
    density: float = _setting("density")
    threshold_interval: int = _setting("threshold_interval")
    boundary_interval: int = _setting("boundary_interval")
    dense_warmup_steps: int = _setting("dense_warmup_steps")
    density_warmup_steps: int = _setting("density_warmup_steps")
    momentum_correction: float = _setting("momentum_correction")
    nonfinite: Literal["raise", "skip"] = _setting("nonfinite")
    balance_trigger: float = _setting("balance_trigger")
    bucket_rounds: int = _setting("bucket_rounds")
    drift_tolerance: float = _setting("drift_tolerance")
    average: bool = _setting("average")
    deferred: bool = _setting("deferred")
    timeout: float = _setting("timeout")
    balanced_regions: bool = _setting("balanced_regions")
    rotate: bool = _setting("rotate")
    gradient_type: Literal["", "float32", "bfloat16", "float16"] = Field(
        default="",
        description="of what is reduced; empty: float32, that of the parameters. Others on GPUs only",
    )
    bucket_mb: float = Field(
        default=25.0,
        gt=0.0,
        description="size of a bucket of gradients, in 1e6 bytes; dense-ovlp and ddp only",
    )

    @field_validator("method")
    @classmethod
    def _is_registered(cls, value: str) -> str:
        if value not in METHODS and value not in TRAINING_MODES:
            raise ValueError(f"{value!r} is not one of {', '.join([*sorted(METHODS), *TRAINING_MODES])}")
        return value

    @model_validator(mode="after")
    def _settings_hold(self) -> Self:
        Settings(**self.settings())
        return self

    def settings(self) -> dict[str, Any]:
        """The keywords of oktopk.Settings."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(Settings)}


class TrainingConfig(Section):
    """How long and on what: the run ends after `steps` or `epochs`, whichever comes first."""

    batch_size: int = Field(default=16, ge=1, description="samples per rank and backward pass")
    accumulate: int = Field(
        default=1,
        ge=1,
        description="backward passes per step, each on batch_size samples; nothing is communicated in between",
    )
    precision: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="bfloat16: where torch's autocast deems it safe; parameters stay float32",
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="share of a training label that all classes get alike; images only, and not where they are held out",
    )
    channels_last: bool = Field(default=False, description="memory layout of images and convolutions")
    cuda_graph: bool = Field(
        default=False,
        description="replay the passes and the optimizer's step as CUDA graphs, which spares a network of many small kernels the "
        "wait for Python; ddp does without",
    )
    deterministic: bool = Field(
        default=False, description="the same bits from run to run on a GPU too, at the price of speed"
    )
    steps: int = Field(default=0, ge=0, description="steps of the run; 0: no limit")
    epochs: int = Field(default=0, ge=0, description="epochs of the run; 0: no limit")
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**31,
        description="of the weights, the order of samples, dropout and augmentation",
    )
    eval_every: int = Field(
        default=0, ge=0, description="steps between evaluations; 0: at the end of each epoch"
    )
    eval_batch_size: int = Field(
        default=128, ge=1, description="samples per rank and forward pass of an evaluation"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto: the GPU of the rank's place on its host, where there is one"
    )
    threads: int = Field(default=1, ge=1, le=4096, description="torch threads per rank")

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if not self.steps and not self.epochs:
            raise ValueError("steps and epochs are both 0: the run would never end")
        return self


class RunConfig(Section):
    """The run file."""

    file: str = Field(
        default="runs/run.h5", description="where the run file is written; its folder is made if need be"
    )
    overwrite: bool = Field(
        default=False,
        description="replace the run file of another run; else a run that was interrupted continues",
    )
    flush_every: int = Field(default=20, ge=1, description="steps between writes to the run file")
    measure_every: int = Field(
        default=0,
        ge=0,
        description="steps between measurements of xi and fill-in, two dense allreduces each; 0: none. "
        "A multiple of reduction.threshold_interval would meet only exact steps, or none",
    )
    time_stages: bool = Field(
        default=False,
        description="time the stages of Ok-Topk's steps where they run as one on the GPUs, which makes them a little slower",
    )
    commit: str = Field(
        default="",
        description="of the sources, for the record; empty: git is asked, where they are a checkout",
    )
    record_gradients: str = Field(
        default="", description="folder to record gradients in, for jobs.bench --replay"
    )
    record_steps: int = Field(
        default=16, ge=1, description="gradients to record, 4n bytes each, on every rank"
    )

    watchdog: float = Field(
        default=600.0,
        ge=0.0,
        description="seconds without a step after which every rank's stack is printed and the job ended; 0: never. "
        "A checkpoint that takes longer to be written is an error",
    )
    watchdog_around: float = Field(
        default=1800.0,
        ge=0.0,
        description="the same for the start of a job, up to its first step, for an evaluation, and for its end; 0: never",
    )

    @field_validator("file")
    @classmethod
    def _is_a_name(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("the run file's name is empty")
        return value


class CheckpointConfig(Section):
    """What a run that is started again continues from; also taken at the end, and on SIGUSR1 and SIGTERM."""

    enabled: bool = Field(default=True, description="whether checkpoints are taken")
    folder: str = Field(
        default="",
        description="of this run alone, on a file system that all ranks share; default: beside the run file",
    )
    every_steps: int = Field(default=0, ge=0, description="steps between checkpoints; 0: not by steps")
    every_minutes: float = Field(
        default=10.0, ge=0.0, description="minutes between checkpoints; 0: not by time"
    )
    keep: int = Field(default=2, ge=1, description="newest checkpoints that are kept; older ones are removed")
