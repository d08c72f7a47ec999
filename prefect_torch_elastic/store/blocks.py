"""A saved Prefect block, by its name, becomes credentials: in the driver and on the command line."""

from __future__ import annotations

from typing import Any

from prefect_torch_elastic.errors import SpecError, StoreError
from prefect_torch_elastic.store.credentials import describe_credentials


def fetch_credentials(reference: str, *, option: str) -> dict[str, Any]:
    """Return what the block holds, as `open_store` takes it.

    Args:
        reference: The block, `type-slug/block-name`.
        option: What the user wrote it in, for messages.

    Raises:
        SpecError: If there is no such block.
        StoreError: If Prefect cannot be asked, or the block is for no store.
    """
    from prefect.blocks.core import Block

    load: Any = Block.load
    try:
        block = load(reference, _sync=True)  # also in an async task: the caller waits in a thread
    except ValueError as error:
        raise SpecError(
            f"`{option}={reference!r}`: there is no such block. "
            "Save one, and name it as `type-slug/block-name`, such as `aws-credentials/training`."
        ) from error
    except Exception as error:  # of httpx, of Prefect, of a block's own package
        raise StoreError(
            f"`{option}={reference!r}` cannot be loaded: {type(error).__name__}: {error}. See with "
            "`prefect config view` which API is asked, and with `prefect block ls` whether it answers."
        ) from error
    return describe_credentials(block)
