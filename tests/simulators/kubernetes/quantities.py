"""Amounts of resources as manifests spell them: whole numbers inside, `500m`, `2` or `4Gi` outside."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

_UNITS = {"m": Fraction(1, 1000), "": Fraction(1)}
_UNITS |= {letter: Fraction(1000) ** power for power, letter in enumerate("kMGTP", 1)}
_UNITS |= {f"{letter}i": Fraction(1024) ** power for power, letter in enumerate("KMGTP", 1)}


def parse_quantity(value: Any) -> Fraction:
    """Return an amount: `1500m` is 3/2, `2Gi` is 2147483648."""
    text = str(value)
    digits = text.rstrip("mkKMGTPi")
    return Fraction(digits) * _UNITS[text[len(digits) :]]


def format_quantity(resource: str, amount: Fraction) -> str:
    """Return the spelling that Kubernetes prefers for a resource: binary units for bytes, `m` for parts."""
    if amount.denominator != 1:
        return f"{int(amount * 1000)}m"
    if resource in ("memory", "ephemeral-storage") or resource.startswith("hugepages"):
        for unit in ("Pi", "Ti", "Gi", "Mi", "Ki"):
            if amount and amount % _UNITS[unit] == 0:
                return f"{int(amount / _UNITS[unit])}{unit}"
    return str(int(amount))
