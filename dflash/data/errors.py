"""The error of everything that reads data."""

from __future__ import annotations


class DataError(ValueError):
    """The data cannot be used; one line says where, what and what to do."""
