"""What the S3 server is told to do wrong, and what it says that it did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Call(NamedTuple):
    """One request that was answered."""

    method: str
    key: str
    size: int
    """Bytes of the request's body, or of the response's for a GET."""
    status: int


@dataclass
class Faults:
    """What goes wrong. The counts (`lose`, `drop`) go down with each request that they hit."""

    latency_seconds: float = 0.0
    bytes_per_second: float = 0.0
    """Of one request; 0 is as fast as it goes."""
    fail_share: float = 0.0
    """Of all requests, that are answered with `fail_status` and not carried out."""
    fail_status: int = 503
    outage_until: float = 0.0
    """On the server's monotonic clock; `start_outage` sets it. Connections are closed until then."""
    lose: int = 0
    """Requests that are carried out, and whose answer is lost."""
    lose_as: str = "drop"
    """`drop` closes the connection, `500` sends an error."""
    drop: int = 0
    """Requests whose connection is closed before they are carried out."""
    only_methods: list[str] = field(default_factory=lambda: ["PUT"])
    """What `lose` and `drop` hit."""
    only_keys: str = ""
    """A part of the keys that `lose` and `drop` hit."""
    ignore_conditions: bool = False
    """As `rclone serve s3` does."""
    expired_keys: list[str] = field(default_factory=list)
    """Access keys whose requests get 400 ExpiredToken."""
    unknown_keys: list[str] = field(default_factory=list)
    """Access keys whose requests get 403 InvalidAccessKeyId."""
