"""`prefect-torch-elastic deploy`: the pools of a flow and its deployment, from the command line."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence
from typing import Annotated, Any

import cyclopts

from prefect_torch_elastic.cli import UsageError
from prefect_torch_elastic.cli.parameters import Json
from prefect_torch_elastic.cli.rendering import print_json, print_lines
from prefect_torch_elastic.errors import ElasticError

_Many = Annotated[tuple[str, ...], cyclopts.Parameter(negative="", show_default=False)]


def deploy(
    place: Annotated[str, cyclopts.Parameter(help="FILE.py, or FILE.py:FLOW if it has several.")],
    /,
    *,
    pool: Annotated[str, cyclopts.Parameter(help="Work pool of the flow itself, the driver.")],
    name: Annotated[str, cyclopts.Parameter(help="Name of the deployment.")] = "default",
    param: Annotated[
        _Many, cyclopts.Parameter(("--param", "-p"), help="NAME=VALUE of the flow; JSON, or text.")
    ] = (),
    job_variable: Annotated[
        _Many, cyclopts.Parameter(("--job-variable", "-jv"), help="NAME=VALUE for the driver's worker.")
    ] = (),
    pool_type: Annotated[_Many, cyclopts.Parameter(help="POOL=TYPE of a pool, if it is missing.")] = (),
    cron: Annotated[str | None, cyclopts.Parameter(help='When it runs, such as "0 2 * * *".')] = None,
    interval: Annotated[float | None, cyclopts.Parameter(help="How often it runs, in seconds.")] = None,
    timezone: Annotated[str | None, cyclopts.Parameter(help="Such as Europe/Berlin.")] = None,
    no_schedule: Annotated[
        bool,
        cyclopts.Parameter(
            negative="", show_default=False, help="Take away the schedule of an earlier `deploy`."
        ),
    ] = False,
    tag: Annotated[_Many, cyclopts.Parameter(help="Tag of the deployment.")] = (),
    json: Json = False,
) -> int:
    """Deploy a flow, and make the work pools that it and its steps need."""
    import httpx

    from prefect_torch_elastic import deploying

    if no_schedule and (cron is not None or interval is not None):
        raise UsageError("`--no-schedule` contradicts `--cron` and `--interval`. Pass one.")
    types = {key: str(value) for key, value in parse_pairs(pool_type, "--pool-type").items()}
    try:
        report = deploying.deploy(
            deploying.load_flow(place),
            work_pool=pool,
            name=name,
            pools=types,
            parameters=parse_pairs(param, "--param") or None,
            job_variables=parse_pairs(job_variable, "--job-variable") or None,
            cron=cron,
            interval=interval,
            timezone=timezone,
            schedule=False if no_schedule else None,
            tags=tag or None,
        )
    except httpx.HTTPError as error:
        raise ElasticError(explain_api_error(error)) from error
    if json:
        print_json(report.as_dict())
    else:
        print_lines([str(report)])
    return 0


def parse_pairs(pairs: Sequence[str], option: str) -> dict[str, Any]:
    """Return `NAME=VALUE` as a dict; a value that is JSON is read as such, any other is text.

    Raises:
        UsageError: If there is no name.
    """
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not name or not equals:
            raise UsageError(f"`{option} {pair}` has no name. Write `{option} NAME=VALUE`.")
        try:
            values[name] = jsonlib.loads(text)
        except ValueError:
            values[name] = text
    return values


def explain_api_error(error: Exception) -> str:
    """Return why Prefect's API could not be used, and the cure."""
    from prefect.settings import get_current_settings

    url = get_current_settings().api.url
    return (
        f"Prefect's API at `{url}` cannot be used: {type(error).__name__}: {error}. Start it with "
        "`prefect server start`, or name another one with `prefect config set PREFECT_API_URL=...`."
    )
