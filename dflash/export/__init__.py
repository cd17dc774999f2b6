"""The published z-lab format: a folder that z-lab, SGLang, vLLM and others load as a drafter.

Covers writing and strict reading of full-attention, non-causal drafters: `config.json` (a Qwen3
config with the four DFlash items), `model.safetensors` (names without prefix; no embedding, no
head) and a model card. Not covered: the speculators format, sliding layers, DFlash 2, sharded
weight files.
"""

from dflash.export.layout import ExportError, published_config, tensor_shapes
from dflash.export.read import load_exported
from dflash.export.write import export_drafter, model_card

__all__ = [
    "ExportError",
    "export_drafter",
    "load_exported",
    "model_card",
    "published_config",
    "tensor_shapes",
]
