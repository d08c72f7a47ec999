"""The options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import cyclopts

StoreUrl = Annotated[
    str | None,
    cyclopts.Parameter(help="URL or directory of the store; by default the one that elastic tasks use here."),
]
RunKey = Annotated[str | None, cyclopts.Parameter("--run", help="Key of the run; not needed if it is alone.")]
NewRunKey = Annotated[str, cyclopts.Parameter("--run", help="Key of the run, a new one.")]
Step = Annotated[
    int | None, cyclopts.Parameter("--step", help="The checkpoint of this step, not the newest.")
]
Credentials = Annotated[
    str | None,
    cyclopts.Parameter("--credentials", help="A Prefect block, such as `aws-credentials/training`."),
]
Json = Annotated[bool, cyclopts.Parameter("--json", negative="", help="Print JSON for programs.")]
To = Annotated[Path, cyclopts.Parameter("--to", help="What to write; nothing may be there yet.")]
