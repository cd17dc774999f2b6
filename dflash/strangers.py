"""Other distributions that install a package of our name: their files and ours would mix."""

from __future__ import annotations

from importlib import metadata

OURS = "dflash-trainer"


def strangers() -> list[str]:
    """One line for each other installed distribution with files in a package ``dflash``."""
    return [
        f"the distribution {name!r} also installs a package 'dflash', whose files mix with ours: "
        f"run 'pip uninstall {name}', then 'pip install --force-reinstall {OURS}'"
        for name in sorted(set(metadata.packages_distributions().get("dflash", ())))
        if name != OURS
    ]
