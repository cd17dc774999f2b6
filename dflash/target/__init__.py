"""The frozen target model, as the trainer sees it: a source of features.

Here: feature capture. Not here: loading, placing and freezing a model.
"""

from dflash.target.capture import capture_features, decoder_layers, forward_with_features

__all__ = ["capture_features", "decoder_layers", "forward_with_features"]
