"""Feature capture: the residual stream leaving chosen decoder layers of a Hugging Face causal LM.

Covers any model whose text decoder keeps its layers in one `nn.ModuleList`. Does not cover
encoder-decoder models, a target spread over processes, or a target compiled as a whole (a graph
captured earlier does not run these hooks).

Threads. Hooks belong to a module, not to a thread, so each hook asks which capture *its own
thread* is in: several threads may capture from one model at once, with different layers, while
others run it plainly, and nobody sees or cuts short anybody else's pass. The hooks of a model are
put in by the first capture that enters and taken out by the last that leaves.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

# Where decoders keep their layers: Llama, Qwen, Gemma, Mistral ...; GPT-2, Falcon; MPT.
_LAYER_LIST_NAMES = ("layers", "h", "blocks")


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The text decoder's layers, first to last.

    Raises ValueError where the model does not keep them in a `layers`, `h` or `blocks` list.
    """
    decoder = _decoder(model)
    for name in _LAYER_LIST_NAMES:
        found = getattr(decoder, name, None)
        if isinstance(found, nn.ModuleList) and len(found) > 0:
            return found
    raise ValueError(
        f"decoder_layers: {type(model).__name__} (decoder {type(decoder).__name__}) has no layer "
        f"list under {', '.join(_LAYER_LIST_NAMES)}: pass the causal LM itself, or a model whose "
        f"decoder has one"
    )


def capture_features(
    model: nn.Module,
    input_ids: Tensor,
    target_layer_ids: Sequence[int],
    *,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Run the target on `input_ids` [b, S] and return features [b, S, K*H_t], without gradients.

    Columns m*H_t .. (m+1)*H_t-1 hold the residual stream *leaving* decoder layer
    `target_layer_ids[m]` (0-based), which is what the drafter's `fc` expects (DFlash, arXiv
    2602.06036). That is `hidden_states[t + 1]` of `output_hidden_states=True`, with one trap: for
    the last layer transformers puts the stream *after the final norm* there. Here the last layer
    is like any other: before the norm.

    Nothing after the last layer asked for is run: not the remaining layers, the final norm or the
    head. The features have the dtype of the stream and lie where the first captured layer does.
    The model stays in its mode: put it in eval mode, or its dropout is in the features.

    For packed rows give `position_ids` [b, S] that restart at every document and no
    `attention_mask`: transformers then keeps the documents apart by itself (with "sdpa", "eager"
    and "flex_attention"), or give both with a mask of your own.

    Safe to call from several threads, on different models or on one. Hooks are removed also when
    the forward fails. Raises ValueError for ids that are empty, repeated or out of range.
    """
    layers = decoder_layers(model)
    ids = _checked_ids(target_layer_ids, len(layers))
    capture = _Capture(layers, ids)
    arguments: dict[str, Any] = {"input_ids": input_ids, "use_cache": False}
    if position_ids is not None:
        arguments["position_ids"] = position_ids
    if attention_mask is not None:
        arguments["attention_mask"] = attention_mask
    # no_grad, not inference_mode: a drafter's autograd graph has to be able to save the features.
    with torch.no_grad(), _hooks.installed(layers), _current(capture), suppress(_Enough):
        _decoder(model)(**arguments)
    return capture.features()


def capture_with_final(
    model: nn.Module,
    input_ids: Tensor,
    target_layer_ids: Sequence[int],
    *,
    position_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`capture_features`, and the last hidden states [b, S, H_t] after the final norm.

    The head on these gives the target's own distribution. Runs the whole decoder.
    """
    layers = decoder_layers(model)
    ids = _checked_ids(target_layer_ids, len(layers))
    capture = _Capture(layers, ids, to_the_end=True)
    arguments: dict[str, Any] = {"input_ids": input_ids, "use_cache": False}
    if position_ids is not None:
        arguments["position_ids"] = position_ids
    with torch.no_grad(), _hooks.installed(layers), _current(capture):
        final: Tensor = _decoder(model)(**arguments)[0]
    return capture.features(), final


def forward_with_features(
    model: nn.Module, target_layer_ids: Sequence[int], **arguments: Any
) -> tuple[Any, Tensor]:
    """Run the causal LM to its end: its output for `arguments`, and the features [b, S, K*H_t].

    The same features as `capture_features`, and as safe with threads; for decoding, which needs
    the logits and the key/value cache as well. Gradients are as the caller has set them.
    """
    layers = decoder_layers(model)
    ids = _checked_ids(target_layer_ids, len(layers))
    capture = _Capture(layers, ids, to_the_end=True)
    with _hooks.installed(layers), _current(capture):
        output = model(**arguments)
    return output, capture.features()


@contextmanager
def capturing(model: nn.Module) -> Iterator[None]:
    """Keeps the hooks of `model` in place between captures: many short forwards cost less."""
    with _hooks.installed(decoder_layers(model)):
        yield


class _Enough(Exception):
    """The last layer asked for has run; leave the forward. Never leaves this module."""


class _Capture:
    """What one captured forward wants, and the buffer that it fills."""

    def __init__(
        self, layers: nn.ModuleList, ids: tuple[int, ...], *, to_the_end: bool = False
    ) -> None:
        self.layers = layers
        self._to_the_end = to_the_end
        self._columns = {t: m for m, t in enumerate(ids)}
        self._last = max(ids)
        self._buffer: Tensor | None = None
        self._missing = set(ids)

    def layer_left(self, index: int, output: Any) -> None:
        """Keep layer `index`'s output if it is wanted; end the forward after the last one."""
        column = self._columns.get(index)
        if column is not None:
            stream: Tensor = output[0] if isinstance(output, tuple) else output
            # Copied at once: a later layer may add to the stream in place.
            width = stream.shape[-1]
            if self._buffer is None:
                shape = (*stream.shape[:-1], width * len(self._columns))
                self._buffer = stream.new_empty(shape)
            self._buffer[..., column * width : (column + 1) * width].copy_(stream)
            self._missing.discard(index)
        if index == self._last and not self._to_the_end:
            raise _Enough

    def features(self) -> Tensor:
        """The full buffer [b, S, K*H_t]."""
        if self._buffer is None or self._missing:
            raise RuntimeError(
                f"capture_features: layers {sorted(self._missing)} did not run in this forward "
                f"(skipped by the model, or the model is compiled): capture from the plain model"
            )
        return self._buffer


class _Hooks:
    """Forward hooks on all layers of a model, for as long as at least one capture is inside.

    All layers at once, and by count: captures that overlap never change a hook dict that one of
    their forwards is reading. (A plain forward may meet the first capture's entry; torch copies
    the dict in one step, which the interpreter lock covers.)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._installed: WeakKeyDictionary[nn.ModuleList, tuple[int, list[Any]]]
        self._installed = WeakKeyDictionary()

    @contextmanager
    def installed(self, layers: nn.ModuleList) -> Iterator[None]:
        """Hold the hooks of `layers` in place."""
        with self._lock:
            count, handles = self._installed.get(layers, (0, []))
            if count == 0:
                handles = [
                    layer.register_forward_hook(_make_hook(layers, index))
                    for index, layer in enumerate(layers)
                ]
            self._installed[layers] = (count + 1, handles)
        try:
            yield
        finally:
            with self._lock:
                count, handles = self._installed[layers]
                if count > 1:
                    self._installed[layers] = (count - 1, handles)
                else:
                    del self._installed[layers]
                    for handle in handles:
                        handle.remove()


_hooks = _Hooks()
_thread = threading.local()


@contextmanager
def _current(capture: _Capture) -> Iterator[None]:
    """Make `capture` the one that this thread's hooks report to."""
    before = getattr(_thread, "capture", None)
    _thread.capture = capture
    try:
        yield
    finally:
        _thread.capture = before


def _make_hook(layers: nn.ModuleList, index: int) -> Any:
    def layer_left(module: nn.Module, args: Any, output: Any) -> None:
        capture: _Capture | None = getattr(_thread, "capture", None)
        if capture is not None and capture.layers is layers:
            capture.layer_left(index, output)

    return layer_left


def _decoder(model: nn.Module) -> nn.Module:
    """The module that runs embedding, layers and final norm, without the head."""
    find: Any = getattr(model, "get_decoder", None)
    decoder = find() if callable(find) else getattr(model, "base_model", model)
    return decoder if isinstance(decoder, nn.Module) else model


def _checked_ids(target_layer_ids: Sequence[int], depth: int) -> tuple[int, ...]:
    ids = tuple(int(t) for t in target_layer_ids)
    if not ids:
        raise ValueError("capture_features: target_layer_ids is empty: name at least one layer")
    if len(set(ids)) != len(ids):
        raise ValueError(f"capture_features: target_layer_ids {list(ids)} names a layer twice")
    outside = [t for t in ids if not 0 <= t < depth]
    if outside:
        raise ValueError(
            f"capture_features: target_layer_ids {outside} outside [0, {depth - 1}]: "
            f"ids are 0-based decoder layers, not hidden_states indices"
        )
    return ids
