"""What an object store's error means: is the object missing, is it worth another try, and what helps.

obstore raises a handful of classes with the service's answer in their text, so the text is what is read here.
Only the service's own code and message are passed on: the rest may hold a signed URL.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>\s*([\w.-]+)\s*</Code>")
_MESSAGE = re.compile(r"<Message>\s*(.*?)\s*</Message>", re.DOTALL)
_QUERY = re.compile(r"(\w+://[^\s?\"']*)\?[^\s\"')]*")
_SAID_CHARACTERS = 300

_MISSING_CODES = {"NoSuchKey", "BlobNotFound"}
_AGAIN_CODES = {"RequestTimeout", "SlowDown", "OperationAborted", "ConditionalRequestConflict", "ServerBusy"}
_AGAIN_STATUS = {408, 425, 429}
_FOR_GOOD_STATUS = {501, 505, 507}
_BUCKET_CODES = {"NoSuchBucket", "InvalidBucketName", "ContainerNotFound", "ContainerBeingDeleted"}
_REGION_CODES = {
    "PermanentRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "InvalidRegion",
    "IncorrectEndpoint",
}
_EXPIRED_CODES = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken"}
_CLOCK_CODES = {"RequestTimeTooSkewed", "RequestExpired"}
_CREDENTIAL_HOSTS = (
    "169.254.",
    "/latest/api/token",
    "metadata.google.internal",
    "//sts.",
    "login.microsoftonline",
    "/oauth2/",
)
_PROVIDER = "credential provider: "  # what precedes the error of a provider of `credentials`
_REASONS = {  # words in the client's account of a connection -> ours
    "kind: Timeout": "no answer in time",
    "ConnectionRefused": "connection refused",
    "dns error": "the host name is not known",
    "ConnectionReset": "connection reset",
    "IncompleteMessage": "the connection was closed before the answer",
    "UnexpectedEof": "the answer broke off",
    "certificate": "the certificate is not trusted",
}


class AnswerKind(StrEnum):
    """What the caller does about an error."""

    MISSING = "missing"
    EXISTS = "exists"
    AGAIN = "again"
    DENIED = "denied"
    NO_CREDENTIALS = "no credentials"
    SHORT = "short"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An error of the store, understood."""

    kind: AnswerKind
    said: str
    """What the service or the network said, without secrets."""
    cure: str


def read_answer(error: Exception, *, service: str, secrets: Iterable[str] = ()) -> Answer:
    """Return what an error of obstore means.

    Args:
        error: What obstore raised.
        service: The URL scheme of the store: `s3`, `gs`, `az` or `memory`.
        secrets: Texts that must not appear in what is said.
    """
    text, _, account = str(error).partition("\n\nDebug source:")
    status = int(match[1]) if (match := _STATUS.search(text)) else 0
    code = match[1] if (match := _CODE.search(text)) else ""
    kind = _find_kind(type(error).__name__, text, status, code)
    said = _summarize(text, account, status, code)
    if kind is AnswerKind.NO_CREDENTIALS:
        said = f"asking for credentials failed ({said.partition(_PROVIDER)[2] or said})"
    elif kind is AnswerKind.SHORT:
        said = "the object is cut short: it ends before the bytes that were asked for"
    for secret in secrets:
        said = said.replace(secret, "***")
    return Answer(kind=kind, said=said, cure=_find_cure(kind, text, status, code, service))


def name_settings(service: str) -> str:
    """Return the environment variables that a service's credentials come from, as prose."""
    return _NAMES[service].keys


def _find_kind(name: str, text: str, status: int, code: str) -> AnswerKind:
    if code in _AGAIN_CODES:
        return AnswerKind.AGAIN
    if name in {"AlreadyExistsError", "PreconditionError"}:
        return AnswerKind.EXISTS
    if code in _MISSING_CODES or (name == "FileNotFoundError" and not status):
        return AnswerKind.MISSING
    if status == 416 or "Invalid range" in text or "Wanted range" in text:
        return AnswerKind.SHORT
    if any(host in text for host in _CREDENTIAL_HOSTS) or _PROVIDER in text:
        return AnswerKind.NO_CREDENTIALS
    if code in _CLOCK_CODES or code in _REGION_CODES or "redirect without LOCATION" in text:
        return AnswerKind.REFUSED
    # A bulk deletion answers 200 and names what it was not allowed to remove.
    if status in {401, 403} or code in _EXPIRED_CODES or (not status and "AccessDenied" in text):
        return AnswerKind.DENIED
    if status in _AGAIN_STATUS or (status >= 500 and status not in _FOR_GOOD_STATUS):
        return AnswerKind.AGAIN
    return AnswerKind.AGAIN if not status and name in {"GenericError", "JoinError"} else AnswerKind.REFUSED


def _summarize(text: str, account: str, status: int, code: str) -> str:
    if status:
        message = match[1] if (match := _MESSAGE.search(text)) else ""
        said = " ".join(part for part in (str(status), code) if part) + (f": {message}" if message else "")
    else:
        reasons = [reason for word, reason in _REASONS.items() if word in account]
        said = reasons[0] if reasons else _QUERY.sub(r"\1", text.strip())
    return said[:_SAID_CHARACTERS].rstrip(".")


def _find_cure(kind: AnswerKind, text: str, status: int, code: str, service: str) -> str:
    names = _NAMES[service]
    if kind is AnswerKind.NO_CREDENTIALS:
        more = " Keys in `~/.aws` need `pip install boto3`." if service == "s3" else ""
        return f"Pass `store_credentials=`, or set {names.keys}.{more}"
    if kind is AnswerKind.SHORT:
        return "Verify the checkpoint, or take an older one."
    if code in _CLOCK_CODES:
        return "The clock of this machine is wrong. Set it (`timedatectl set-ntp true`)."
    if code in _REGION_CODES or "redirect without LOCATION" in text:
        return f"The {names.bucket} is in another region. Set {names.region}."
    if code in _BUCKET_CODES:
        return f"Create the {names.bucket}, or correct its name in the URL."
    if code in _EXPIRED_CODES:
        return f"The credentials have expired. Set new {names.keys}, or pass a `store_credentials=` block."
    if kind is AnswerKind.DENIED:
        return (
            f"Check the credentials (`store_credentials=`, or {names.keys}), and that they may read, write, "
            f"list and delete in the {names.bucket}."
        )
    if status == 507 or "StorageFull" in code:
        return "The store is full. Make room, or keep fewer checkpoints."
    if status == 404:
        return f"This is no answer of such a store. Check the endpoint: {names.endpoint}."
    if status >= 500 or status in _AGAIN_STATUS:
        return "The service is failing or throttles. Look at its status, and try again."
    if not status:
        return f"Check the network and the endpoint: {names.endpoint}."
    return f"Check the URL, the endpoint ({names.endpoint}) and the region."


@dataclass(frozen=True)
class _Names:
    bucket: str
    keys: str
    region: str
    endpoint: str


_NAMES = {
    "s3": _Names(
        "bucket",
        "`AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`",
        "`AWS_REGION`, or `region_name` of the credentials block",
        "`AWS_ENDPOINT_URL`, or `endpoint_url` of the credentials block",
    ),
    "gs": _Names(
        "bucket", "`GOOGLE_APPLICATION_CREDENTIALS`", "the bucket's own location", "`GOOGLE_BASE_URL`"
    ),
    "az": _Names(
        "container",
        "`AZURE_STORAGE_ACCOUNT_NAME` and `AZURE_STORAGE_ACCOUNT_KEY`",
        "the account's own endpoint",
        "`AZURE_STORAGE_ENDPOINT`",
    ),
    "memory": _Names("store", "none", "none", "none"),
}
