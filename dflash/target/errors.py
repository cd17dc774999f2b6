"""What is raised about a target that cannot be loaded, used or made."""


class TargetError(ValueError):
    """The target cannot be used; one line says which, why, and what to do."""
