"""Loading the frozen target: which copies there are, where they lie, and what the drafter needs.

Covers causal LMs that ``AutoModelForCausalLM`` reads, dense or mixture, whose layers are all
attention. Recurrent and linear-attention layers are refused: they carry one document of a packed
row into the next, and their state cannot be rolled back in decoding.

Copies. ``replica``: one copy for each *physical* device; workers on one device (``cpu:0`` ..
``cpu:7``, or ``cuda:0`` five times) share it. That is safe because nothing in it changes: weights
are frozen, the model is in eval mode, each call has its own activations, and capture asks which
thread it is in. The one thing that transformers does change in a forward, the rotary table of
length-dependent rope types, is behind a lock. ``sharded``: one copy over all devices.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from dflash.config import TargetSettings
from dflash.target.capture import capture_features, capture_with_final, decoder_layers
from dflash.target.errors import TargetError
from dflash.target.mask_token import choose_mask_token
from dflash.transfer import to_device

__all__ = ["BUNDLED", "Target", "TargetError", "Targets", "load_targets", "target_path"]

BUNDLED = Path(__file__).parent / "bundled"
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
_CHANGING_ROPE = {"dynamic", "longrope"}


class Target:
    """One copy of the target, for any number of threads."""

    def __init__(self, model: nn.Module, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.config: Any = model.config
        self.embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
        self.lm_head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
        self.device = next(self.embedding.parameters()).device
        self._turn: contextlib.AbstractContextManager[Any] = (
            threading.Lock() if _rope_changes(self.config) else contextlib.nullcontext()
        )

    def features(
        self, input_ids: Tensor, position_ids: Tensor, target_layer_ids: Sequence[int]
    ) -> Tensor:
        """Features [b, S, K*H_t] of packed rows: see `capture_features`.

        input_ids, position_ids: [b, S] on any device; positions restart at every document.
        """
        with self._turn:
            return capture_features(
                self.model,
                to_device(input_ids, self.device),
                target_layer_ids,
                position_ids=to_device(position_ids, self.device),
            )

    def features_and_final(
        self, input_ids: Tensor, position_ids: Tensor, target_layer_ids: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """The same, and the last hidden states [b, S, H_t]: see `capture_with_final`."""
        with self._turn:
            return capture_with_final(
                self.model,
                to_device(input_ids, self.device),
                target_layer_ids,
                position_ids=to_device(position_ids, self.device),
            )

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [..., H] of token ids [...]."""
        out: Tensor = self.embedding(ids.to(self.device))
        return out

    @torch.no_grad()
    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., H], cast to the head's dtype; no gradient."""
        weight = next(self.lm_head.parameters())
        out: Tensor = self.lm_head(hidden.to(weight.device, weight.dtype))
        return out


class Targets:
    """All workers' targets. ``replicas[i]`` is worker i's; some or all are the same object."""

    def __init__(self, replicas: Sequence[Target]) -> None:
        self.replicas = list(replicas)
        first = self.replicas[0]
        self.model, self.tokenizer, self.config = first.model, first.tokenizer, first.config
        self.ends = (first.embedding, first.lm_head)

    def mask_token_id(self, explicit: int | None = None) -> int:
        """The drafter's mask token: see `choose_mask_token`."""
        return choose_mask_token(self.model, self.tokenizer, explicit)


def load_targets(settings: TargetSettings, devices: Sequence[torch.device]) -> Targets:
    """Loads the target for workers on ``devices``, frozen and in eval mode.

    Raises TargetError where the path holds no usable model, the model is not a causal LM of
    attention layers, or its embedding has fewer rows than the tokenizer has tokens.
    """
    devices = [_physical(device) for device in devices]
    distinct = list(dict.fromkeys(devices))
    path = target_path(settings)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    common = {
        "local_files_only": not settings.download,
        "trust_remote_code": settings.trust_remote_code,
    }
    sharded = settings.placement == "sharded" and len(distinct) > 1
    model = _load_model(path, settings, common | (_spread(distinct) if sharded else {}))
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **common)
    except Exception as error:  # a foreign folder can fail in any way
        raise TargetError(f"target.path={path}: its tokenizer: {_line(error)}") from error
    _check(path, model, tokenizer)
    model.requires_grad_(False).eval()
    if sharded:
        return Targets([Target(model, tokenizer)] * len(devices))
    copies = {device: Target(_copy_to(model, device), tokenizer) for device in distinct}
    return Targets([copies[device] for device in devices])


def target_path(settings: TargetSettings) -> str:
    """The folder or hub name that the setting stands for; raises TargetError for a missing one."""
    if settings.path == "bundled":
        if not (BUNDLED / "config.json").is_file():
            raise TargetError(
                "target.path=bundled: this copy of the package ships no target; make one with "
                "'dflash make-tiny-target FOLDER' and set target.path=FOLDER"
            )
        return str(BUNDLED)
    folder = Path(settings.path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise TargetError(
                f"target.path={settings.path}: has no config.json: not a model folder"
            )
        return str(folder)
    if folder.is_absolute() or settings.path.startswith((".", "~")) or folder.exists():
        raise TargetError(f"target.path={settings.path}: no such folder")
    return settings.path  # a hub name: from the local cache, or downloaded if the recipe says so


def _load_model(path: str, settings: TargetSettings, arguments: dict[str, Any]) -> nn.Module:
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, settings.dtype), output_loading_info=True, **arguments
        )
    except Exception as error:  # a foreign folder can fail in any way
        said = _line(error)
        if "Unrecognized configuration class" in said:
            said = f"{_model_type(said)}is not a causal language model"
        elif not Path(path).is_dir() and not settings.download:
            said = "neither a folder nor in the local cache; target.download=true would fetch it"
        raise TargetError(f"target.path={path}: {said}") from error
    for what in ("missing_keys", "mismatched_keys"):
        if names := sorted(map(str, loaded[what])):
            raise TargetError(
                f"target.path={path}: {len(names)} {what.replace('_', ' ')} in its weights, "
                f"such as {names[0]}: not a whole checkpoint of a {type(model).__name__}"
            )
    found: nn.Module = model
    return found


def _check(path: str, model: Any, tokenizer: Any) -> None:
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - _ATTENTION
    if kinds or getattr(model, "_is_stateful", False):
        what = ", ".join(sorted(map(str, kinds))) or "a recurrent state"
        raise TargetError(
            f"target.path={path}: {type(model).__name__} has {what}: hybrid and recurrent targets "
            "are not supported, every layer has to be attention"
        )
    if model.config.is_encoder_decoder or model.get_output_embeddings() is None:
        raise TargetError(f"target.path={path}: {type(model).__name__} is not a causal LM")
    try:
        decoder_layers(model)
    except ValueError as error:
        raise TargetError(f"target.path={path}: {error}") from error
    if not tokenizer("a")["input_ids"]:  # what transformers makes where the files are missing
        raise TargetError(f"target.path={path}: has no tokenizer files: its tokenizer is empty")
    rows = model.get_input_embeddings().weight.shape[0]
    if rows < len(tokenizer):
        raise TargetError(
            f"target.path={path}: the tokenizer has {len(tokenizer)} tokens but the embedding only "
            f"{rows} rows: they do not belong together"
        )


def _copy_to(model: nn.Module, device: torch.device) -> nn.Module:
    """The model itself where it is there already, or a copy without a second one in between."""
    tensors = [*model.parameters(), *model.buffers()]
    if all(tensor.device == device for tensor in tensors):
        return model
    moved: dict[int, Any] = {}
    for tensor in tensors:
        there = tensor.detach().to(device)
        is_parameter = isinstance(tensor, nn.Parameter)
        moved[id(tensor)] = nn.Parameter(there, requires_grad=False) if is_parameter else there
    return copy.deepcopy(model, moved)


def _spread(devices: Sequence[torch.device]) -> dict[str, Any]:
    """Arguments that make transformers spread a model over these GPUs and no others."""
    import importlib.util

    if any(device.type != "cuda" for device in devices):
        raise TargetError("target.placement=sharded: the target devices must all be GPUs, or CPUs")
    if importlib.util.find_spec("accelerate") is None:
        raise TargetError(
            f"target.placement=sharded over {len(devices)} GPUs needs 'pip install accelerate'"
        )
    free = {device.index or 0: int(0.9 * torch.cuda.mem_get_info(device)[0]) for device in devices}
    return {"device_map": "balanced", "max_memory": free}


def _physical(device: torch.device) -> torch.device:
    """``cpu:3`` is a name for a worker; its memory is the CPU's."""
    return torch.device("cpu") if device.type == "cpu" else device


def _rope_changes(config: Any) -> bool:
    rope = getattr(config.get_text_config(), "rope_parameters", None)
    return any(kind in str(rope) for kind in _CHANGING_ROPE)


def _model_type(said: str) -> str:
    """The configuration's class name out of transformers' message about it."""
    _, _, rest = said.partition("configuration_")
    return f"{rest.split()[0].rpartition('.')[2].strip(chr(39) + '>')} " if rest else ""


def _line(error: BaseException) -> str:
    said = " ".join(str(error).split())
    return said if len(said) <= 300 else said[:297] + "..."
