"""The recipe: one tree of settings, read from YAML, changed by dotted overrides, checked once.

Covers every setting of a run and its checks that need no device. Does not look at hardware, files
or the target: that is ``dflash plan``. An unknown key is refused with the nearest known one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

_Share = Annotated[float, Field(ge=0, lt=1)]
Device = Annotated[str, Field(pattern=r"^(cpu|cuda)(:\d+)?$")]


class RecipeError(ValueError):
    """The recipe cannot be used; one line names the field, what is wrong and what to do."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TargetSettings(_Section):
    """The frozen model. ``path``: a folder, a hub name (if ``download``), or ``bundled``."""

    path: str = "bundled"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    placement: Literal["replica", "sharded"] = "replica"
    download: bool = False
    trust_remote_code: bool = False


class DrafterSettings(_Section):
    """The trained model's shape; what is None is the target's or the default rule's."""

    num_hidden_layers: int = Field(5, ge=1)
    block_size: int = Field(16, ge=2)
    mask_token_id: int | None = None
    target_layer_ids: tuple[int, ...] | None = None
    num_features: int | None = Field(None, ge=1)
    intermediate_size: int | None = Field(None, ge=1)
    num_attention_heads: int | None = Field(None, ge=1)
    num_key_value_heads: int | None = Field(None, ge=1)
    head_dim: int | None = Field(None, ge=2)
    initial: str | None = None  # an exported drafter to start from


class RegenerateSettings(_Section):
    """Text by the target itself: how many prompts are gone on from, how long, at what heat."""

    prompts: int = Field(1000, ge=1)
    held_out_prompts: int = Field(64, ge=1)
    prompt_tokens: int = Field(64, ge=1)  # of a text; of a conversation all up to the answer
    max_prompt_tokens: int = Field(2048, ge=1)  # of a conversation; its end is kept
    new_tokens: int = Field(192, ge=2)
    temperatures: tuple[Annotated[float, Field(ge=0)], ...] = Field((0.0, 1.0), min_length=1)
    batch_size: int = Field(64, ge=1)


class DataSettings(_Section):
    """Text and how it becomes rows."""

    train: tuple[str, ...] = ()  # files or folders: .jsonl (chat or text), .txt, anything as text
    held_out: tuple[str, ...] = ()
    format: Literal["auto", "chat", "text"] = "auto"
    supervise: Literal["assistant", "last_turn", "all"] = "assistant"
    row_length: int = Field(3072, ge=8)
    anchors_per_row: int = Field(512, ge=1)
    max_document_tokens: int | None = Field(None, ge=2)
    on_bad_line: Literal["skip", "fail"] = "skip"
    shuffle: bool = True
    regenerate: RegenerateSettings | None = None  # None: the text is learnt as it is


class ObjectiveSettings(_Section):
    """The loss."""

    weighting: Literal["decay", "dpace", "uniform"] = "decay"
    gamma: float | None = Field(None, gt=0)  # None: the paper's for the block size
    dpace_alpha: float = Field(0.5, gt=0, le=1)
    teacher_share: float = Field(0.0, ge=0, le=1)  # of the loss: the target's distribution
    head_chunk_slots: int = Field(2048, ge=1)  # slots whose logits exist at a time


class OptimizerSettings(_Section):
    """The optimizer, its schedule and the size of a step."""

    name: Literal["adamw", "muon"] = "adamw"  # muon: for matrices; the rest is AdamW's
    learning_rate: float = Field(6e-4, gt=0)
    betas: tuple[_Share, _Share] = (0.9, 0.95)
    momentum: float = Field(0.95, ge=0, lt=1)  # muon's
    weight_decay: float = Field(0.0, ge=0)
    eps: float = Field(1e-8, gt=0)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_ratio: float = Field(0.04, ge=0, lt=1)
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    clip: float = Field(1.0, gt=0)
    accumulation: int = Field(1, ge=1)  # packets per drafter and step


class ScheduleSettings(_Section):
    """Which role runs where, and how the roles hold together.

    ``cpu:0`` .. are logical devices: each is a worker thread of its own.
    """

    targets: tuple[Device, ...] = ("cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:4")
    drafters: tuple[Device, ...] = ("cuda:5", "cuda:6", "cuda:7")
    queue_depth: int = Field(2, ge=1)  # packets waiting per drafter
    guard: Literal["auto", "thread-local", "force-compile", "serial", "lock"] = "auto"
    recompile_limit: int = Field(64, ge=1)
    stall_seconds: float = Field(600.0, gt=0)  # a worker without progress for so long ends the run
    join_seconds: float = Field(2.0, gt=0)
    threads_per_worker: int = Field(1, ge=1)  # intra-op threads, CPU only


class RunSettings(_Section):
    """How long, from what seed, what is written and when."""

    steps: int | None = Field(None, ge=1)
    epochs: int | None = Field(None, ge=1)
    seed: int = Field(0, ge=0, lt=2**63)  # what torch's generators take
    autocast: Literal["auto", "off"] = "auto"  # bf16 where the device has it
    log_every: int = Field(1, ge=1)
    evaluate_every: int = Field(100, ge=1)
    evaluate_rows: int = Field(16, ge=0)
    checkpoint_every: int = Field(100, ge=1)
    keep_checkpoints: int = Field(3, ge=1)
    tensorboard: bool = True

    @model_validator(mode="after")
    def _one_length(self) -> RunSettings:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of steps and epochs")
        return self


class Recipe(_Section):
    """The whole tree."""

    name: str = "run"
    target: TargetSettings = TargetSettings()
    drafter: DrafterSettings = DrafterSettings()
    data: DataSettings = DataSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    run: RunSettings

    @model_validator(mode="after")
    def _fits(self) -> Recipe:
        if not self.schedule.targets or not self.schedule.drafters:
            raise ValueError("schedule: at least one target and one drafter device is needed")
        if not self.data.train:
            raise ValueError("data.train: name at least one file or folder")
        return self

    def at_home_anywhere(self) -> Recipe:
        """With absolute paths where a relative one names something here: a run's own recipe is
        read from other folders as well."""

        def absolute(path: str) -> str:
            return str(Path(path).absolute()) if Path(path).exists() else path

        data, target, drafter = self.data, self.target, self.drafter
        paths = {name: tuple(map(absolute, getattr(data, name))) for name in ("train", "held_out")}
        sections: dict[str, _Section] = {"data": data.model_copy(update=paths)}
        if target.path != "bundled":
            sections["target"] = target.model_copy(update={"path": absolute(target.path)})
        if drafter.initial is not None:
            sections["drafter"] = drafter.model_copy(update={"initial": absolute(drafter.initial)})
        return self.model_copy(update=sections)

    def to_yaml(self) -> str:
        """The resolved recipe, as saved with a run; :func:`load_recipe` reads it back."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Reads a YAML recipe and applies overrides such as ``optimizer.learning_rate=1e-3``.

    Raises:
        RecipeError: the file cannot be read, is not a mapping, or a setting is unknown or wrong.
    """
    path = Path(path)
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: is not UTF-8 text") from error
    except yaml.YAMLError as error:
        raise RecipeError(f"{path}: is not YAML ({' '.join(str(error).split())})") from error
    if not isinstance(tree, dict):
        raise RecipeError(f"{path}: must be a mapping of settings")
    for override in overrides:
        _apply(tree, override)
    return make_recipe(tree, where=str(path))


def make_recipe(tree: Mapping[str, Any], *, where: str = "recipe") -> Recipe:
    """Checks a plain tree; raises :class:`RecipeError` with one line for the first fault."""
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        location = tuple(part for part in first["loc"] if isinstance(part, str))
        name = ".".join(location)
        if first["type"] == "extra_forbidden":
            near = difflib.get_close_matches(location[-1], _keys(location[:-1]), n=1, cutoff=0.5)
            hint = f"; did you mean {'.'.join((*location[:-1], near[0]))!r}?" if near else ""
            raise RecipeError(f"{where}: unknown setting {name!r}{hint}") from error
        said = first["msg"].removeprefix("Value error, ")
        raise RecipeError(f"{where}: {name + ': ' if name else ''}{said}") from error


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise RecipeError(f"override {override!r}: expected section.name=value")
    *sections, leaf = key.split(".")
    place: Any = tree
    for section in sections:
        place = place.setdefault(section, {}) if isinstance(place, dict) else None
        if not isinstance(place, dict):
            raise RecipeError(f"override {override!r}: {section!r} is not a section")
    try:
        place[leaf] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"override {override!r}: {text!r} is not a YAML value") from error


def _keys(location: tuple[str, ...]) -> list[str]:
    model: Any = Recipe
    for name in location:
        model = model.model_fields[name].annotation
        if get_origin(model) is not None:
            model = get_args(model)[0]
    return list(model.model_fields)
