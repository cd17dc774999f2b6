"""One body of tests in three sizes: eight logical CPU devices, one GPU, eight GPUs.

A test that takes ``size`` runs once without a mark (CPU), once under ``-m gpu1`` (all eight roles
on ``cuda:0``) and once under ``-m gpu8`` (targets on 0 to 4, drafters on 5 to 7).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

STDLIB = Path(__import__("json").__file__).parents[1]


@dataclass(frozen=True)
class Size:
    """Where the eight roles run."""

    name: str
    targets: tuple[str, ...]
    drafters: tuple[str, ...]

    @property
    def exact(self) -> bool:
        """Whether results must be equal bit for bit (on the CPU) or to a tolerance."""
        return self.name == "cpu"


SIZES = [
    pytest.param(
        Size("cpu", tuple(f"cpu:{i}" for i in range(5)), tuple(f"cpu:{i}" for i in range(5, 8))),
        id="cpu",
    ),
    pytest.param(Size("gpu1", ("cuda:0",) * 5, ("cuda:0",) * 3), id="gpu1", marks=pytest.mark.gpu1),
    pytest.param(
        Size("gpu8", tuple(f"cuda:{i}" for i in range(5)), tuple(f"cuda:{i}" for i in range(5, 8))),
        id="gpu8",
        marks=pytest.mark.gpu8,
    ),
]


@pytest.fixture(params=SIZES)
def size(request: pytest.FixtureRequest) -> Size:
    """The size of this run of the test."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 target of the real architecture with random weights, and a byte tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from dflash.target.byte_tokenizer import EMBEDDING_ROWS, save_byte_tokenizer

    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=EMBEDDING_ROWS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    save_byte_tokenizer(folder, 1024)
    return folder


@pytest.fixture
def make_recipe_of(target_folder: Path):
    """``make_recipe_of(size, run={...}, ...)``: a small recipe on the standard library's text."""
    from dflash.config import Recipe, make_recipe

    def make(size: Size, **sections: dict[str, Any]) -> Recipe:
        tree: dict[str, dict[str, Any]] = {
            "target": {"path": str(target_folder), "dtype": "float32"},
            "drafter": {"num_hidden_layers": 2, "block_size": 8},
            "data": {
                "train": [str(STDLIB / "json")],
                "held_out": [str(STDLIB / "html" / "__init__.py")],
                "format": "text",
                "row_length": 128,
                "anchors_per_row": 16,
            },
            "optimizer": {"learning_rate": 3e-3},
            "schedule": {
                "targets": list(size.targets),
                "drafters": list(size.drafters),
                "stall_seconds": 120,
            },
            "run": {
                "steps": 6,
                "evaluate_every": 3,
                "evaluate_rows": 4,
                "checkpoint_every": 3,
                "autocast": "off",
                "tensorboard": False,
            },
        }
        for name, values in sections.items():
            tree[name] = {**tree[name], **values}
        return make_recipe(tree)

    return make
