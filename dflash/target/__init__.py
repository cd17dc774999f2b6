"""The frozen target model, as the trainer sees it: a source of features.

Here: feature capture; `load` loads, places and freezes a model, `tiny` makes the bundled one,
`bits` measures it.
"""

from dflash.target.capture import capture_features, decoder_layers, forward_with_features

__all__ = ["capture_features", "decoder_layers", "forward_with_features"]
