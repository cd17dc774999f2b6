"""A tiny random target, a random drafter for it, and proposers that are always right or wrong."""

from __future__ import annotations

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash.model import Drafter, DrafterConfig

VOCABULARY = 41


def make_target(vocabulary: int = VOCABULARY, dtype=torch.float64, seed: int = 0, spread=0.5):
    """A Qwen3 with weights wide enough that its greedy text does not settle on one token."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        attn_implementation="sdpa",
    )
    model = Qwen3ForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, spread, generator=generator)
    return model.to(dtype).eval().requires_grad_(False)


def make_drafter(target, block_size: int = 5, seed: int = 1):
    """A drafter that knows nothing of the target."""
    config = DrafterConfig.for_target(
        target.config,
        num_hidden_layers=2,
        block_size=block_size,
        mask_token_id=target.config.vocab_size - 1,
        target_layer_ids=(1, 0, 3),
        initializer_range=0.3,
    )
    drafter = Drafter(config)
    drafter.init_weights(torch.Generator().manual_seed(seed))
    return drafter.to(next(target.parameters()).dtype)


class Oracle:
    """Proposes from a known text; `wrong` slots (1 ..) get another token. Checks what it is fed.

    `text` is the prompt and the output; features must be those of the committed positions, once
    each and in order, which is compared with one pass over the whole text.
    """

    target_layer_ids = (1, 3)

    def __init__(self, text, prompt_length, block_size=5, wrong=(), features=None):
        self.text = text
        self.block_size = block_size
        self._wrong = set(wrong)
        self._features = features
        self._seen = 0

    def start(self):
        self._seen = 0

    def propose(self, features, anchor):
        start, self._seen = self._seen, self._seen + features.shape[1]
        if self._features is not None:
            expected = self._features[:, start : self._seen]
            torch.testing.assert_close(features, expected, rtol=0, atol=1e-9)
        assert self.text[self._seen] == anchor  # the context ends just before the anchor
        logits = torch.zeros(self.block_size - 1, VOCABULARY, dtype=torch.float64)
        for slot in range(1, self.block_size):
            at = self._seen + slot
            token = self.text[at] if at < len(self.text) else 0
            logits[slot - 1, (token + (slot in self._wrong)) % VOCABULARY] = 9.0
        return logits
