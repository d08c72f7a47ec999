"""How long errors of the Kubernetes API that may pass are waited out, and what settles a lost answer."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

from prefect_torch_elastic.kubernetes.answers import ClusterError

_T = TypeVar("_T")
_DELAYS = (0.5, 1.0, 2.0, 4.0)
_LONGEST_DELAY = 10.0  # whatever the API asks for: somebody waits for the call


def insist(
    call: Callable[[], _T], *, sleep: Callable[[float], None], settle: Callable[[], _T | None] | None = None
) -> _T:
    """Call until it is answered for good, at most five times.

    Args:
        call: It raises `ClusterError`.
        sleep: Waits so many seconds.
        settle: Finds out after an error whether the call was carried out all the same; None if it was not.
    """
    for delay in _DELAYS:
        try:
            return call()
        except ClusterError as error:
            if not error.may_pass:
                raise
            asked = min(error.retry_after or 0.0, _LONGEST_DELAY)
        # Many workers that lost the API at the same moment do not come back at the same moment.
        sleep(max(asked, delay * random.uniform(0.5, 1.0)))
        if settle is not None and (found := settle()) is not None:
            return found
    return call()
