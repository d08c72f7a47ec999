"""A store in an object store: S3, GCS, Azure or memory, over obstore, with deadlines, retries and cures.

obstore sends each request once. Repeating is done here, because here it is known that an expired token needs
a new client, that a signal should be handled between two tries, and that a conditional write whose answer
was lost has to be read back.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from prefect_torch_elastic.errors import ObjectMissing, StoreError
from prefect_torch_elastic.store import StoredObject
from prefect_torch_elastic.store.answers import Answer, AnswerKind, read_answer
from prefect_torch_elastic.store.clients import load_obstore, open_client
from prefect_torch_elastic.store.credentials import connect, find_secrets
from prefect_torch_elastic.store.keys import check_folder, check_key, describe_short_object

_FIRST_DELAY_SECONDS = 0.1
_MAX_DELAY_SECONDS = 5.0
_SLOWEST_BYTES_PER_SECOND = 256 << 10  # of one large write; its time limit counts the body too
_SAY_AFTER_SECONDS = 1.0  # a throttled request here and there is no news
_DELETE_CHUNK = 1000  # keys of one DeleteObjects request
_LIST_CHUNK = 1000
_STREAM_CHUNK = 256 << 10  # below what malloc takes from the kernel anew, and few enough calls from Python
# Not the module's own generator: a training run's random numbers must not depend on how often S3 throttled.
_random = random.Random()

T = TypeVar("T")


def open_objects(
    url: str,
    credentials: Mapping[str, Any] | None,
    *,
    request_timeout_seconds: float,
    retry_seconds: float,
) -> ObjectStore:
    """Return the object store at `url`; see `open_store`."""
    load_obstore()
    limits: dict[str, Any] = {
        "request_timeout_seconds": request_timeout_seconds,
        "retry_seconds": retry_seconds,
    }
    parts = urlsplit(url)
    if parts.scheme == "memory":
        memory = load_obstore().store.MemoryStore()
        return ObjectStore(lambda _: memory, url="memory://", **limits)
    if not parts.netloc:
        raise StoreError(f"`store={url!r}` names no bucket. Write `{parts.scheme}://bucket/prefix`.")
    prefix = check_folder(unquote(parts.path).strip("/"))
    secrets = find_secrets(credentials)
    place = f"{parts.scheme}://{parts.netloc}" + (f"/{prefix}" if prefix else "")

    def open_newest(timeout_seconds: float) -> Any:
        return open_client(
            parts.scheme,
            parts.netloc,
            prefix,
            connect(parts.scheme, credentials),
            secrets=secrets,
            request_timeout_seconds=timeout_seconds,
        )

    return ObjectStore(open_newest, url=place, secrets=secrets, **limits)


class ObjectStore:
    """An object store behind obstore; see `Store` for what its methods do.

    Args:
        open_client: Makes a store of obstore, with the newest credentials and a time limit for one request.
        url: Without secrets.
        request_timeout_seconds: How long one request may take; a large write has longer.
        retry_seconds: How long failing requests of one operation are repeated.
        secrets: Texts that no message may contain.
    """

    def __init__(
        self,
        open_client: Callable[[float], Any],
        *,
        url: str,
        request_timeout_seconds: float,
        retry_seconds: float,
        secrets: Sequence[str] = (),
    ) -> None:
        self._open_client = open_client
        self._url = url
        self._service = urlsplit(url).scheme
        self._timeout_seconds = request_timeout_seconds
        self._retry_seconds = retry_seconds
        self._secrets = tuple(secrets)
        self._lock = threading.Lock()
        self._client = open_client(request_timeout_seconds)
        self._worked = False
        self._away = False
        self._obstore: Any = load_obstore()

    def __repr__(self) -> str:
        return f"ObjectStore({self._url!r})"

    @property
    def url(self) -> str:
        return self._url

    def put(self, key: str, data: bytes | memoryview) -> None:
        check_key(key)
        seconds = memoryview(data).nbytes / _SLOWEST_BYTES_PER_SECOND

        def put(client: Any) -> None:
            if seconds > self._timeout_seconds:
                client = self._open_client(seconds)
            self._obstore.put(client, key, data, use_multipart=False)

        self._run("write", key, put)

    def create(self, key: str, data: bytes) -> bool:
        check_key(key)

        def create(client: Any) -> bool:
            try:
                self._obstore.put(client, key, data, mode="create", use_multipart=False)
            except Exception as error:
                # The object is there, or the answer was lost and ours may be there: look.
                answer = read_answer(error, service=self._service)
                if answer.kind not in {AnswerKind.EXISTS, AnswerKind.AGAIN}:
                    raise
                try:
                    found = self._obstore.get(client, key)
                    return found.meta["size"] == len(data) and bytes(found.bytes()) == data
                except Exception as other:
                    if read_answer(other, service=self._service).kind is not AnswerKind.MISSING:
                        raise
                raise error from None  # it is not there: try again, or say what was said
            return True

        return self._run("write", key, create)

    def get(self, key: str) -> memoryview:
        check_key(key)
        return self._run("read", key, lambda client: memoryview(self._obstore.get(client, key).bytes()))

    def get_range(self, key: str, start: int, length: int) -> memoryview:
        check_key(key)
        if not length:
            return memoryview(b"")

        def read(client: Any) -> memoryview:
            return memoryview(self._obstore.get_range(client, key, start=start, length=length))

        data = self._run("read", key, read)
        if data.nbytes != length:
            raise StoreError(describe_short_object(key, self._url, start, length, start + data.nbytes))
        return data

    def stream(self, key: str, length: int) -> Iterator[memoryview]:
        # One request, however large the object is; a connection that breaks off is taken up again after the
        # last byte that came.
        check_key(key)
        position = 0
        pieces: Iterator[Any] | None = None

        def fetch(client: Any) -> memoryview:
            nonlocal pieces
            try:
                if pieces is None:
                    found = self._obstore.get(client, key, options={"range": (position, length)})
                    pieces = iter(found.stream(min_chunk_size=_STREAM_CHUNK))
                return memoryview(next(pieces, b""))
            except BaseException:
                pieces = None
                raise

        while position < length:
            data = self._run("read", key, fetch)
            if not data.nbytes:
                raise StoreError(describe_short_object(key, self._url, 0, length, position))
            position += data.nbytes
            yield data

    def list(self, prefix: str, *, after: str = "") -> Iterator[StoredObject]:
        folder = check_folder(prefix)
        last, stream = after, None

        def fetch(client: Any) -> Sequence[Any]:
            nonlocal stream
            try:
                if stream is None:
                    where = {"offset": last or None, "chunk_size": _LIST_CHUNK}
                    stream = self._obstore.list(client, folder or None, **where)
                return next(stream, ())
            except BaseException:
                stream = None  # a listing that broke off is taken up again after the last key
                raise

        while chunk := self._run("list", folder, fetch):
            for entry in chunk:
                if entry["path"] <= last:
                    raise StoreError(
                        f"`{self._url}` lists its objects out of order, as S3 directory buckets do: "
                        f"`{entry['path']}` came after `{last}`. Use a general purpose bucket."
                    )
                last = entry["path"]
                yield StoredObject(key=last, size=entry["size"], modified=entry["last_modified"].timestamp())

    def list_folders(self, prefix: str) -> Sequence[str]:
        folder = check_folder(prefix)
        found = self._run(
            "list", folder, lambda client: self._obstore.list_with_delimiter(client, folder or None)
        )
        return sorted(name.rstrip("/").rpartition("/")[2] for name in found["common_prefixes"])

    def delete(self, keys: Iterable[str]) -> None:
        rest = (check_key(key) for key in keys)
        while chunk := list(islice(rest, _DELETE_CHUNK)):
            try:
                self._run("delete", chunk[0], lambda client, chunk=chunk: self._obstore.delete(client, chunk))
            except ObjectMissing:  # GCS and Azure mind, and may have left the others
                for key in chunk:
                    with suppress(ObjectMissing):
                        self._run("delete", key, lambda client, key=key: self._obstore.delete(client, key))

    def _run(self, verb: str, key: str, operation: Callable[[Any], T]) -> T:
        """Run one operation, again and again until it works, is refused, or its time is up."""
        started, tries, renewed = time.monotonic(), 0, False
        while True:
            client = self._client
            try:
                result = operation(client)
            except Exception as error:  # noqa: BLE001  (obstore raises its own and built-in errors alike)
                answer = read_answer(error, service=self._service, secrets=self._secrets)
            else:
                self._note_success()
                return result
            tries += 1
            waited = time.monotonic() - started
            if answer.kind is AnswerKind.MISSING:
                raise ObjectMissing(f"`{key}` is not in `{self._url}`.")
            if answer.kind is AnswerKind.DENIED and not renewed:
                renewed = True
                self._renew_client(client)
                continue
            if not self._may_repeat(answer) or waited >= self._retry_seconds:
                raise self._explain(verb, key, answer, tries=tries, waited=waited)
            self._note_failure(answer, waited)
            delay = min(_MAX_DELAY_SECONDS, _FIRST_DELAY_SECONDS * 2 ** min(tries - 1, 10))
            time.sleep(min(delay * _random.uniform(0.5, 1.0), max(0.0, self._retry_seconds - waited)))

    def _may_repeat(self, answer: Answer) -> bool:
        if answer.kind is AnswerKind.NO_CREDENTIALS:
            # A store that never worked has none; one that did lost its metadata service for a moment.
            return self._worked
        return answer.kind in {AnswerKind.AGAIN, AnswerKind.EXISTS}

    def _explain(self, verb: str, key: str, answer: Answer, *, tries: int, waited: float) -> StoreError:
        spent = f" (tried {tries} times in {waited:.0f} s)" if tries > 2 else ""
        what = f"`{key}` in `{self._url}`" if key else f"`{self._url}`"
        # Without `from`: the client's own account may hold a signed URL or a key.
        error = StoreError(f"cannot {verb} {what}: {answer.said}{spent}. {answer.cure}")
        error.__suppress_context__ = True
        return error

    def _renew_client(self, old: Any) -> None:
        """Open a new client with new credentials, unless another thread just did."""
        with self._lock:
            if self._client is old:
                self._client = self._open_client(self._timeout_seconds)

    def _note_failure(self, answer: Answer, waited: float) -> None:
        if waited > _SAY_AFTER_SECONDS and not self._away:
            self._away = True
            logging.getLogger(__name__).warning(
                "`%s` does not answer as it should (%s); trying for up to %.0f s",
                self._url,
                answer.said,
                self._retry_seconds,
            )

    def _note_success(self) -> None:
        self._worked = True
        if self._away:
            self._away = False
            logging.getLogger(__name__).info("`%s` answers again", self._url)
