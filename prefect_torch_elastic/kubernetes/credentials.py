"""Which environment variables of a gang are secret: they belong into a Secret, not into a manifest (pure)."""

from __future__ import annotations

import re
from collections.abc import Mapping

# Whoever may look at a JobSet or a pod reads the values in its manifest. The words are those of Prefect's
# settings and of the clouds: PREFECT_API_AUTH_STRING, AWS_SECRET_ACCESS_KEY, HF_TOKEN, PGPASSWORD.
_SECRET = re.compile(
    r"(^|_)(API_?KEY|ACCESS_KEY|ACCOUNT_KEY|PRIVATE_KEY|KEY|TOKEN|SECRET|SECRETS|CREDENTIALS?|AUTH|AUTH_STRING"
    r"|CONNECTION_STRING|CONNECTION_URL|SAS|HEADERS|PAT|DSN|WEBHOOK|WEBHOOK_URL)(_VALUE|_JSON)?(_?[0-9]+)?$"
    r"|_PWD(_?[0-9]+)?$|PASSW(OR)?D|PASSPHRASE|SECRET_",  # `PWD` alone is where a shell is
    re.IGNORECASE,
)
# A name alone is one for a person, except on the web: there it is a token.
_USER_IN_URL = re.compile(
    r"(?<![-+.a-z0-9])([a-z][-+.a-z0-9]*://[^/\s@]*:[^/\s@]+|([a-z]+\+)?https?://[^/\s@]+)@", re.IGNORECASE
)


def is_secret(name: str, value: str) -> bool:
    """Return whether a variable is to be kept out of manifests: by its name, or for a password in a URL."""
    return bool(_SECRET.search(name) or _USER_IN_URL.search(value))


def split_credentials(env: Mapping[str, str | None]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables that anybody may read, and the secret ones; those without a value are left out."""
    known = {name: value for name, value in env.items() if value is not None}
    secret = {name: value for name, value in known.items() if value and is_secret(name, value)}
    return {name: value for name, value in known.items() if name not in secret}, secret
