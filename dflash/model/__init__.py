"""The drafter: its configuration, its layers, and the attention functions it can run with.

Not here: the embedding and the output head, which are the frozen target's; the attention mask,
which `dflash.objective` builds; compilation, which `dflash.compile` decides.
"""

from dflash.model.attention import Attend, flex_attend, sdpa_attend
from dflash.model.cache import ContextCache
from dflash.model.config import DrafterConfig, default_target_layer_ids
from dflash.model.drafter import Drafter

__all__ = [
    "Attend",
    "ContextCache",
    "Drafter",
    "DrafterConfig",
    "default_target_layer_ids",
    "flex_attend",
    "sdpa_attend",
]
