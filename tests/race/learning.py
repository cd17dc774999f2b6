"""One drafter's lesson: a small Qwen3 target reads the standard library, a drafter learns from it.

The target has the real architecture and random weights; the text is the source of modules that
every Python has, one token per byte. What is shown is that each thread trains: its loss goes down.
"""

from __future__ import annotations

import json.decoder
import textwrap
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash.compile import CompileGuard
from dflash.compile.flex_on_cpu import training_backend
from dflash.model.attention import flex_attend
from dflash.model.config import DrafterConfig
from dflash.model.drafter import Drafter
from dflash.objective.anchors import sample_anchors
from dflash.objective.block_mask import flex_block_mask
from dflash.objective.labels import block_labels
from dflash.objective.layout import block_token_ids, positions
from dflash.objective.losses import decay_weights, decayed_cross_entropy
from dflash.target.capture import capture_features

STEPS = 8
GOAL = 0.8  # the last loss must be below this part of the first one
BLOCK, SLOTS, ROW = 8, 16, 128
MASK = 256  # the token after the bytes
TEXT = "the standard library's json.decoder and textwrap, as bytes"


class Lesson:
    """Target, text, drafter and optimizer of one thread."""

    def __init__(self, index: int, device: torch.device, guard: CompileGuard) -> None:
        self.index, self.device, self.guard = index, device, guard
        self.label = f"drafter-{index}"
        self.target = _target().to(device)
        self.config = DrafterConfig.for_target(
            self.target.config, num_hidden_layers=2, block_size=BLOCK, mask_token_id=MASK
        )
        self.drafter = Drafter(self.config).to(device)
        self.drafter.init_weights(torch.Generator().manual_seed(index))
        self.optimizer = torch.optim.AdamW(self.drafter.parameters(), lr=1e-2)
        self.attend = flex_attend(
            guard.compile(flex_attention, label=self.label, backend=training_backend(device))
        )
        self.weights = decay_weights(BLOCK).to(device)
        self.ids, self.documents, self.local = _row(index)

    def step(self) -> float:
        """Captures features, drafts, learns; returns the loss before the update."""
        supervised = torch.ones(ROW, dtype=torch.bool)
        anchors = sample_anchors(
            supervised, self.documents, SLOTS, seed=self.index, epoch=0, sample=0
        )
        ids = self.ids.to(self.device)
        features = capture_features(
            self.target,
            ids[None],
            self.config.target_layer_ids,
            position_ids=self.local[None].to(self.device),
        )
        blocks = block_token_ids(self.ids, anchors, BLOCK, MASK).to(self.device)
        hidden = self.drafter(
            features,
            self.target.get_input_embeddings()(blocks)[None].detach(),
            positions(self.local, anchors, BLOCK)[None].to(self.device),
            flex_block_mask(anchors, self.documents, BLOCK, device=self.device),
            self.attend,
        )
        labels, counted = block_labels(self.ids, supervised, self.documents, anchors, BLOCK)
        logits = self.target.lm_head(hidden)[0].unflatten(0, (SLOTS, BLOCK))
        sums = decayed_cross_entropy(
            logits, labels.to(self.device), counted.to(self.device), self.weights
        )
        loss = sums.numerator / sums.denominator
        with self.guard.region():
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


def _target() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=MASK + 1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=False,
        initializer_range=0.2,  # a head of 0.02 can hardly prefer one byte to another
    )
    return Qwen3ForCausalLM(config).eval().requires_grad_(False)


def _row(index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two documents in a row: token ids, document ids, document-local positions, each [ROW]."""
    half = ROW // 2
    pieces = []
    for module in (json.decoder, textwrap):
        text = Path(str(module.__file__)).read_bytes()
        begin = 400 * index
        pieces.append(torch.tensor(list(text[begin : begin + half]), dtype=torch.int64))
    documents = torch.arange(2).repeat_interleave(half)
    return torch.cat(pieces), documents, torch.arange(half).repeat(2)
