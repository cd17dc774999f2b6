"""Checkpoints: what a run needs to go on bit for bit, written so that no crash can harm the last.

Here: folders of safetensors and JSON, their manifest, rotation and the best one. Not here: which
tensors and which state a run has (`dflash.train`), the published formats (`dflash.export`).
Nothing is ever pickled, so a checkpoint from anywhere can be read without running its code.
"""

from dflash.checkpoint.manifest import CheckpointError
from dflash.checkpoint.store import CheckpointStore

__all__ = ["CheckpointError", "CheckpointStore"]
