"""A linear layer that is born unset: `Drafter.init_weights` sets it.

torch's own first draw would be thrown away, costs seconds at a billion parameters, and takes
numbers from the global generator, which some other thread may rely on.
"""

from __future__ import annotations

from torch import nn


class Linear(nn.Linear):
    """`nn.Linear` without initialisation: memory is whatever it was until somebody writes it."""

    def reset_parameters(self) -> None:
        """Leave the parameters alone."""
