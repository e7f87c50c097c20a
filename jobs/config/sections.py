"""Sections of a training run's configuration: each key with its type, bounds and default.

Those of the reduction have their defaults in oktopk.Settings.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

from data.command import attribute_texts
from jobs.config.modes import DENSE_OVLP, TRAINING_MODES
from oktopk import METHODS, Settings


class Section(BaseModel):
    """Keys that are typed, known and never change."""

    # strict: "16" is not 16. A string that reads as a number is more often a slip than an intention.
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

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

    def _check_owners(self, owners: Mapping[str, tuple[str, ...]], kind: str) -> None:
        """Refuse keys that were set and are for other kinds than this one."""
        for key, names in owners.items():
            default = type(self).model_fields[key].get_default(call_default_factory=True)
            value = getattr(self, key)
            if kind not in names and value != default:
                raise ValueError(f"{key} {value!r} is for {' and '.join(names)}, not for {kind}")


class ModelConfig(Section):
    """The network. Keys of another network than `name` are refused.

    With `factory` the network is one's own. It trains on what the data set needs: images, speech (`an4`) or text.
    """

    name: Literal["vgg16", "lstm", "bert", "gpt", "vit", "own"] = "vgg16"
    """The network to train; `own` is the one that `factory` makes"""
    width: float = Field(default=1.0, gt=0.0, le=8.0)
    """For vgg16 and lstm: factor on the channels of every layer"""
    layers: int = Field(default=12, ge=1)
    """For bert, gpt and vit: number of layers"""
    hidden: int = Field(default=768, ge=64, multiple_of=64)
    """For bert, gpt and vit: number of channels, 64 to a head"""
    patch: int = Field(default=32, ge=1)
    """For vit: pixels per side of a patch"""
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """For bert: probability of dropout in every layer"""
    vocabulary: int = Field(default=0, ge=0)
    """For bert and gpt: words that the text file must have; 0: as many as it has"""
    positions: int = Field(default=0, ge=0)
    """For gpt: tokens that the sequences of the text file must have; 0: as many as they have"""
    factory: str = Field(default="", pattern=r"^([\w.]+:[\w.]+)?$")
    """Your own network, "my_package.my_module:build": a callable that returns a torch.nn.Module"""
    arguments: dict[str, JsonValue] = Field(default_factory=dict)
    """Keywords that `factory` is called with, a table [model.arguments]"""

    _OWNERS: ClassVar[dict[str, tuple[str, ...]]] = {
        "width": ("vgg16", "lstm"),
        "layers": ("bert", "gpt", "vit"),
        "hidden": ("bert", "gpt", "vit"),
        "dropout": ("bert",),
        "vocabulary": ("bert", "gpt"),
        "positions": ("gpt",),
        "patch": ("vit",),
        **dict.fromkeys(("factory", "arguments"), ("own",)),
    }

    @model_validator(mode="before")
    @classmethod
    def _a_factory_makes_ones_own(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("factory"):
            return {"name": "own", **values}
        return values

    @model_validator(mode="after")
    def _keys_are_its_own(self) -> Self:
        if self.factory and self.name != "own":
            raise ValueError(
                f"name {self.name!r} and a factory are two networks: leave one out, or set name to 'own'"
            )
        self._check_owners(self._OWNERS, self.name)
        if self.name == "own" and not self.factory:
            raise ValueError("name 'own' needs a factory")
        return self


class DataConfig(Section):
    """What is trained on. `digits` need no file; the others are read from `path`, written by data.prepare.

    `an4` is for lstm, `text` for bert and gpt, all others are images.
    """

    name: Literal["digits", "cifar10", "prepared", "an4", "text"] = "digits"
    """The data set to train on; `cifar10` and `prepared` are any file of images that data.prepare wrote"""
    path: str = ""
    """File that data.prepare wrote; empty for digits"""
    size: int = Field(default=32, ge=32, le=512)
    """For digits: pixels per side"""
    held_out: float = Field(default=0.5, gt=0.0, lt=1.0)
    """For digits: share of the images that is never trained on"""
    resize: int = Field(default=0, ge=0, le=1024)
    """For images: pixels per side that they are scaled to, bilinearly, on the device; 0: as they are"""
    crop: int = Field(default=0, ge=0)
    """For images: pixels of padding that training images are cropped from at random"""
    flip: bool = False
    """For images: mirror training images at random; not for digits"""
    tempo: tuple[float, ...] = Field(default=(), strict=False)
    """For an4: [least, most] factor on the tempo of a training utterance, drawn at random, within [0.5, 2]; empty: tempo as
    recorded"""
    eval_sequences: int = Field(default=0, ge=0)
    """For text: held-out sequences per evaluation, spread evenly over all of them; 0: all"""

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
        kind = self.name if self.name in ("an4", "text") else "images"
        owners = {
            **dict.fromkeys(("crop", "flip", "resize"), ("images",)),
            "eval_sequences": ("text",),
            "tempo": ("an4",),
        }
        self._check_owners(owners, kind)
        return self


class OptimizerConfig(Section):
    """The torch optimizer that sees the reduced, averaged gradient; for updates each rank's own."""

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    """The torch optimizer of that name"""
    lr: float = Field(default=0.1, gt=0.0)
    """Learning rate, which the schedule multiplies"""
    momentum: float = Field(default=0.0, ge=0.0, lt=1.0)
    """For sgd: momentum of the reduced gradient"""
    nesterov: bool = False
    """For sgd: use Nesterov's form of momentum"""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Factor of the weight decay, which adamw applies to the parameters and the others add to the gradient"""
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """For adam and adamw: decay of the gradient's running mean"""
    beta2: float = Field(default=0.999, ge=0.0, lt=1.0)
    """For adam and adamw: decay of the running mean of its square"""
    eps: float = Field(default=1e-8, gt=0.0)
    """For adam and adamw: term added to the root of that mean"""
    bias_correction: bool = True
    """For adamw: correct the running means for their start from zero"""
    decay_vectors: bool = True
    """Whether biases and the weights of norms decay as well"""
    clip_norm: float = Field(default=0.0, ge=0.0)
    """Largest Euclidean norm of the reduced gradient, equal on all ranks, for updates of a rank's own; 0: no clipping"""

    @model_validator(mode="after")
    def _momentum_is_used(self) -> Self:
        owners = {**dict.fromkeys(("momentum", "nesterov"), ("sgd",)), "bias_correction": ("adamw",)}
        self._check_owners(owners, self.name)
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")
        return self


class ScheduleConfig(Section):
    """The learning rate over the run, as a factor of optimizer.lr, set at every step.

    warmup and milestones count in `unit`, of which "run" is the whole run. The warm-up rises linearly from
    warmup_start (a fraction, or "1/ranks") to 1; then `step` multiplies by gamma at each milestone and
    `exponential` after each unit of the run, `cosine` and `linear` fall to `final` at the last step. `one-cycle` is
    `cosine` with a warm-up along a cosine.
    """

    name: Literal["constant", "step", "exponential", "cosine", "linear", "one-cycle"] = "constant"
    """Course of the learning rate after the warm-up"""
    unit: Literal["steps", "epochs", "run"] = "steps"
    """Unit of warmup and milestones; `run` counts in shares of the whole run"""
    warmup: float = Field(default=0.0, ge=0.0)
    """Length of the rise at the start, in `unit`"""
    warmup_start: Annotated[float, Field(ge=0.0, le=1.0)] | Literal["1/ranks"] = 0.0
    """Factor that the rise starts from, in [0, 1]"""
    milestones: tuple[float, ...] = Field(default=(), strict=False)
    """For step: where the rate is multiplied by gamma, ascending, in `unit`"""
    gamma: float = Field(default=0.1, gt=0.0, le=1.0)
    """For step and exponential: factor that the rate is multiplied by"""
    final: float = Field(default=0.0, ge=0.0, le=1.0)
    """For cosine, linear and one-cycle: factor at the last step"""

    @model_validator(mode="after")
    def _milestones_ascend(self) -> Self:
        if any(b <= a for a, b in zip(self.milestones, self.milestones[1:], strict=False)):
            raise ValueError(f"milestones {list(self.milestones)} do not ascend")
        self._check_owners({"milestones": ("step",)}, self.name)
        if self.name == "step" and not self.milestones:
            raise ValueError("the schedule 'step' needs milestones")
        if self.name == "one-cycle" and not self.warmup:
            raise ValueError("the schedule 'one-cycle' needs a warmup")
        if self.unit == "run" and self.warmup > 1.0:
            raise ValueError(f"a warmup of {self.warmup} runs is not in [0, 1]")
        return self


_SETTINGS = {
    name: (first := text.split(". ")[0].rstrip("."))[:1].upper() + first[1:]
    for name, text in attribute_texts(Settings).items()
}
"""Attribute of oktopk.Settings -> the first sentence on it."""


def _setting(name: str) -> Any:
    """A key with the default and the description that it has in oktopk.Settings."""
    return Field(default=getattr(Settings, name), description=_SETTINGS.get(name))


class ReductionConfig(Section):
    """How gradients are summed over the ranks: `method` is one of oktopk.METHODS or of TRAINING_MODES.

    The keys besides `method`, `sends`, `every`, `gradient_type`, `overlap` and `bucket_mb` are those of
    oktopk.Settings, and for oktopk.METHODS.
    """

    method: str = Field(
        default="oktopk",
        description=f"How gradients are summed: {', '.join([*sorted(METHODS), *TRAINING_MODES])}",
    )
    sends: Literal["gradients", "updates"] = "gradients"
    """For sparse methods of oktopk: what ranks sum. `updates`: each rank's optimizer steps on its own gradient, and the ranks
    sum what it changed; for adam and adamw"""
    every: int = Field(default=1, ge=1)
    """For sends 'updates': number of steps from one exchange to the next"""
    density: float = _setting("density")
    threshold_interval: int = _setting("threshold_interval")
    boundary_interval: int = _setting("boundary_interval")
    dense_warmup_steps: int = _setting("dense_warmup_steps")
    density_warmup_steps: int = _setting("density_warmup_steps")
    first_density: float = _setting("first_density")
    nonfinite: Literal["raise", "skip"] = _setting("nonfinite")
    balance_trigger: float = _setting("balance_trigger")
    bucket_rounds: int = _setting("bucket_rounds")
    drift_tolerance: float = _setting("drift_tolerance")
    average: bool = _setting("average")
    deferred: bool = _setting("deferred")
    timeout: float = _setting("timeout")
    levels: Literal["auto", "flat", "hosts"] = _setting("levels")
    ranks_per_host: int = _setting("ranks_per_host")
    balanced_regions: bool = _setting("balanced_regions")
    rotate: bool = _setting("rotate")
    wire: Literal["auto", "plain", "float32", "bfloat16", "int8", "int4"] = _setting("wire")
    exchange: Literal["auto", "direct", "grid"] = _setting("exchange")
    gradient_type: Literal["", "float32", "bfloat16", "float16"] = ""
    """Type of the gradients that are reduced, others than float32 on GPUs only; empty: float32, that of the parameters"""
    overlap: bool = False
    """For methods of oktopk: reduce gradients in buckets behind the backward pass"""
    bucket_mb: float = Field(default=0.0, ge=0.0)
    """For overlap and ddp: size of a bucket of gradients, in 1e6 bytes; 0: as oktopk.DistributedOptimizer, others 25"""

    @field_validator("method")
    @classmethod
    def _is_registered(cls, value: str) -> str:
        if value == DENSE_OVLP:
            raise ValueError(f"{value!r} is overlap = true with method 'dense', on GPUs method 'ddp'")
        if value not in METHODS and value not in TRAINING_MODES:
            raise ValueError(f"{value!r} is not one of {', '.join([*sorted(METHODS), *TRAINING_MODES])}")
        return value

    @model_validator(mode="after")
    def _settings_hold(self) -> Self:
        Settings(**self.settings())
        if self.overlap and self.method not in METHODS:
            instead = ": its like is 'ddp'" if self.method == "nccl" else ""
            raise ValueError(f"overlap is for the methods of oktopk, not for {self.method!r}{instead}")
        return self

    def buckets(self) -> dict[str, Any]:
        """The keywords of oktopk.DistributedOptimizer that divide the gradient into buckets."""
        return {"overlap": True, "bucket_mb": self.bucket_mb} if self.overlap else {}

    def settings(self) -> dict[str, Any]:
        """The keywords of oktopk.Settings."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(Settings)}


class TrainingConfig(Section):
    """How long and on what: the run ends after `steps` or `epochs`, whichever comes first."""

    batch_size: int = Field(default=16, ge=1)
    """Samples per rank and backward pass"""
    accumulate: int = Field(default=1, ge=1)
    """Backward passes per step, each on batch_size samples; nothing is communicated in between"""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Type of the network's arithmetic; bfloat16 where torch's autocast deems it safe, with parameters in float32"""
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=1.0)
    """For images: share of a training label that is spread evenly over all classes; not in evaluations"""
    channels_last: bool = False
    """Store images and convolutions with their channels last"""
    cuda_graph: bool = False
    """Replay forward and backward passes as CUDA graphs, which helps where Python launches many small kernels; ddp does so
    after 11 steps of a job"""
    deterministic: bool = False
    """Compute the same bits from run to run on a GPU too, at the price of speed"""
    steps: int = Field(default=0, ge=0)
    """Number of steps of the run; 0: no limit"""
    epochs: int = Field(default=0, ge=0)
    """Number of epochs of the run; 0: no limit"""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of the weights, the order of samples, dropout and augmentation"""
    eval_every: int = Field(default=0, ge=0)
    """Number of steps between evaluations; 0: at the end of each epoch"""
    eval_batch_size: int = Field(default=128, ge=1)
    """Samples per rank and forward pass of an evaluation"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of each rank; `auto` is the GPU of the rank's place on its host, or the CPU where there is none"""
    threads: int = Field(default=1, ge=1, le=4096)
    """Number of torch threads per rank"""

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if not self.steps and not self.epochs:
            raise ValueError("steps and epochs are both 0: the run would never end")
        return self


class RunConfig(Section):
    """The run file."""

    file: str = Field(default="runs/run.h5", min_length=1)
    """Run file to write; its folder is made if need be"""
    overwrite: bool = False
    """Replace the run file of another run; else an interrupted run continues"""
    flush_every: int = Field(default=20, ge=1)
    """Number of steps between writes to the run file"""
    measure_every: int = Field(default=0, ge=0)
    """Number of steps between measurements of xi and fill-in, at two dense allreduces each; 0: none. A multiple of
    reduction.threshold_interval would meet only exact steps, or none"""
    time_stages: bool = False
    """Time the stages of Ok-Topk's steps where they run as one on the GPUs, which slows them a little"""
    timeline: bool = False
    """Write when each rank began each phase, bucket and stage of some steps into RUN-timeline.json beside the run file, a
    trace for Perfetto; some 130 bytes each"""
    timeline_after: int = Field(default=10, ge=0)
    """Number of steps before the first of a timeline"""
    timeline_steps: int = Field(default=10, ge=0)
    """Number of steps of a timeline; 0: all that follow"""
    commit: str = ""
    """Commit of the sources, for the record; empty: the one that git names"""
    watchdog: float = Field(default=600.0, ge=0.0)
    """Seconds without a step after which every rank's stack is printed and the job ended; 0: never. A checkpoint that takes
    longer to write is an error"""
    watchdog_around: float = Field(default=1800.0, ge=0.0)
    """Seconds of the same limit for the start of a job up to its first step, for an evaluation, and for its end; 0: never"""

    def in_timeline(self, step: int) -> bool:
        """Whether a step, counted from 1, is in the timeline."""
        return self.timeline and 0 < step - self.timeline_after <= (self.timeline_steps or math.inf)


class CheckpointConfig(Section):
    """Checkpoints, from which a restarted run continues; also taken at the end, and on SIGUSR1 and SIGTERM."""

    enabled: bool = True
    """Whether checkpoints are taken and a run resumes from them"""
    folder: str = ""
    """Folder of this run's checkpoints alone, on a file system that all ranks share; empty: beside the run file"""
    every_steps: int = Field(default=0, ge=0)
    """Number of steps between checkpoints; 0: not by steps"""
    every_minutes: float = Field(default=10.0, ge=0.0)
    """Number of minutes between checkpoints; 0: not by time"""
    keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep; older ones are removed"""
