"""A module of the user's that no pool has: it travels with the calls that need it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """How to make tokens."""

    name: str
    vocabulary: int = 256


class BadCorpusError(Exception):
    """What a body raises; its class is of this module."""

    def __init__(self, why: str, *, code: int = 0) -> None:
        super().__init__(why)
        self.code = code


def measure(text: str) -> dict[str, object]:
    """Be a step whose function stands in an importable module."""
    import kit  # a package beside this file

    return {"weight": kit.weigh(text), "module": __name__}
