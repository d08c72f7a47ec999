"""Deploy the pretraining flow with a nightly schedule: its driver in one work pool, its steps in theirs.

    python flows/deploy.py
    python flows/deploy.py --pool driver --cron "30 1 * * *" --timezone Europe/Berlin --steps 400

It may be run again at any time: what is there already is left alone, and only differences are changed.
"""

import argparse

from pretrain import pretraining

from prefect_torch_elastic.deploying import DeployReport, deploy

NIGHTLY = "0 2 * * *"


def deploy_pretraining(*, pool: str, cron: str, timezone: str | None, steps: int) -> DeployReport:
    """Deploy the flow, and make the pools that it names and that are missing."""
    return deploy(
        pretraining,
        work_pool=pool,
        name="nightly",
        parameters={"steps": steps},
        cron=cron,
        timezone=timezone,
        tags=["pretraining"],
    )


def main() -> None:
    """Deploy, and print what was created, what changed, and what keeps it from running."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pool", default="driver", help="work pool of the driver (default: %(default)s)")
    parser.add_argument("--cron", default=NIGHTLY, help="when it runs (default: %(default)s)")
    parser.add_argument("--timezone", help="of --cron, such as Europe/Berlin (default: UTC)")
    parser.add_argument("--steps", type=int, default=800, help="optimizer steps (default: %(default)s)")
    given = parser.parse_args()
    print(deploy_pretraining(pool=given.pool, cron=given.cron, timezone=given.timezone, steps=given.steps))


if __name__ == "__main__":
    main()
