"""Why an object is refused, field by field, in the words of the API server and of its webhooks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.simulators.kubernetes.fields import spell
from tests.simulators.kubernetes.objects import Resource
from tests.simulators.kubernetes.refusals import ForbiddenError, InvalidError

SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
SUBDOMAIN_RULE = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must "
    "start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is "
    r"'[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
)


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One field that is not as it must be. `text` alone is the message when `word` is empty."""

    field: str
    text: str
    value: Any = None
    word: str = "Invalid value"
    reason: str = "FieldValueInvalid"

    @property
    def message(self) -> str:
        """What is wrong, without the field."""
        match self.word:
            case "Required value":
                return self.word + (f": {self.text}" if self.text else "")
            case "Duplicate value" | "Not found":
                return f"{self.word}: {spell(self.value)}"
            case "Unsupported value":
                return f"{self.word}: {spell(self.value)}: {self.text}"
            case _:
                return f"{self.word}: {spell(self.value)}: {self.text}"


def refuse_invalid(
    resource: Resource, name: str, causes: Sequence[Cause], *, webhook: str = ""
) -> InvalidError:
    """Return the 422 for a list of causes, in the words of the API server or of one of its webhooks."""
    parts = [f"{cause.field}: {cause.message}" for cause in causes]
    kind = f"{resource.kind}.{resource.group}" if resource.group else resource.kind
    said = parts[0] if len(parts) == 1 else f"[{', '.join(parts)}]"
    prefix = f'admission webhook "{webhook}" denied the request: ' if webhook else ""
    return InvalidError(
        f'{prefix}{kind} "{name}" is invalid: {said}',
        causes=[{"reason": c.reason, "message": c.message, "field": c.field} for c in causes],
        details={"name": name, "group": resource.group, "kind": resource.kind},
    )


def deny(webhook: str, text: str) -> ForbiddenError:
    """Return the 403 of a webhook."""
    return ForbiddenError(f'admission webhook "{webhook}" denied the request: {text}')
