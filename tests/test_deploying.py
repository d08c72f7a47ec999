"""Deploying against a real API: what is made, and that a second time changes only what differs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectNotFound
from prefect.flows import Flow
from prefect.schedules import Cron, Interval, RRule, Schedule
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.workers.process import ProcessWorker

from prefect_torch_elastic import SpecError
from prefect_torch_elastic.cli import UsageError
from prefect_torch_elastic.cli import run as run_command
from prefect_torch_elastic.cli.deploy import parse_pairs
from prefect_torch_elastic.deploying import DeployReport, Outcome, deploy, load_flow
from prefect_torch_elastic.deploying.source import locate_flow
from tests.deployed import ONE_FLOW, step, writing

# ---------------------------------------------------------------- against a server


@pytest.fixture
def client(prefect_server: str) -> Iterator[SyncPrefectClient]:
    """A client, and a Prefect without the pools and deployments of other tests."""
    with get_client(sync_client=True) as client:
        for deployment in client.read_deployments():
            client.delete_deployment(deployment.id)
        for pool in client.read_work_pools():
            client.delete_work_pool(pool.name)
        yield client


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """`write(text)` makes a Python file."""
    with writing(tmp_path) as write:
        yield write


@pytest.fixture
def main(write) -> Flow[Any, Any]:
    return load_flow(str(write(ONE_FLOW)))


def read(client: SyncPrefectClient, report: DeployReport) -> DeploymentResponse:
    return client.read_deployment(report.deployment_id)


def crons(client: SyncPrefectClient, report: DeployReport) -> list[str]:
    schedules: list[Any] = [one.schedule for one in read(client, report).schedules]
    return sorted(schedule.cron for schedule in schedules)


def add_schedule(client: SyncPrefectClient, report: DeployReport, cron: str) -> None:
    """Add a schedule as a person does in the UI."""
    client.create_deployment_schedules(report.deployment_id, [(CronSchedule(cron=cron), True)])


def outcomes(report: DeployReport) -> dict[str, str]:
    return {change.thing: str(change.outcome) for change in report.changes}


def details(report: DeployReport, thing: str) -> str:
    return "\n".join(
        detail for change in report.changes if change.thing.startswith(thing) for detail in change.details
    )


def stamps(client: SyncPrefectClient) -> dict[str, object]:
    """Return when each thing of the workspace was changed last."""
    deployments = client.read_deployments()
    things = [*deployments, *client.read_work_pools(), *(one for d in deployments for one in d.schedules)]
    return {str(thing.id): thing.updated for thing in [*things, *client.read_flows()]}


def test_deploy_creates_the_pools_of_driver_and_steps(client, write):
    file = write(
        """
        from prefect import flow
        from tests.deployed import step
        train, data = step("train", name="train"), step("data", name="data")
        @flow
        def main():
            data()
            train()
        """
    )
    report = deploy(load_flow(str(file)), work_pool="driver")
    assert outcomes(report) == {
        "work pool `driver`": "created",
        "work pool `data`": "created",
        "work pool `train`": "created",
        "deployment `main/default`": "created",
    }
    assert {pool.name: pool.type for pool in client.read_work_pools()} == dict.fromkeys(
        ("driver", "data", "train"), "process"
    )
    assert "step       `train` runs in pool `train`" in str(report)


def test_deploy_gives_a_new_pool_the_default_template_of_its_type(client, main):
    deploy(main, work_pool="driver")
    template = client.read_work_pool("driver").base_job_template
    assert template == ProcessWorker.get_default_base_job_template()
    assert "command" in template["variables"]["properties"]


def test_deploy_creates_pools_of_the_types_that_are_named(client, main):
    deploy(main, work_pool="driver", pools={"cluster": "kubernetes"})
    pool = client.read_work_pool("cluster")
    assert pool.type == "kubernetes"
    assert "image" in pool.base_job_template["variables"]["properties"]


def test_deploy_leaves_pools_alone_that_exist(client, main):
    client.create_work_pool(WorkPoolCreate(name="driver", type="docker", description="mine"))
    before = client.read_work_pool("driver")
    report = deploy(main, work_pool="driver", pools={"driver": "process"})
    assert client.read_work_pool("driver") == before
    assert details(report, "work pool") == "type `docker`, not `process`: it was there already"


def test_deploy_refuses_an_unknown_type_and_makes_nothing(client, main):
    with pytest.raises(SpecError, match=r"pool `b`: there is no type `no-such`\. .*`process`"):
        deploy(main, work_pool="a", pools={"b": "no-such"})
    assert client.read_work_pools() == []


def test_deployment_is_what_prefect_itself_would_deploy(client, main, capsys):
    report = deploy(main, work_pool="driver", parameters={"steps": 2}, tags=["a"])
    ours = read(client, report)
    theirs_id = main.from_source(
        source=str(locate_flow(main).folder), entrypoint="deployed_flows.py:main"
    ).deploy(
        name="theirs",
        work_pool_name="driver",
        parameters={"steps": 2},
        tags=["a"],
        build=False,
        push=False,
        print_next_steps=False,
    )
    theirs = client.read_deployment(theirs_id)
    own = {"id", "name", "created", "updated", "version_id", "version_info"}
    own |= {
        "version"
    }  # in a clone Prefect takes the commit; ours is that of the flow's file, which it changes with
    assert ours.model_dump(exclude=own) == theirs.model_dump(exclude=own)


def test_report_names_the_page_of_the_deployment(client, main):
    report = deploy(main, work_pool="driver")
    assert report.url.endswith(f"/deployments/deployment/{report.deployment_id}")
    assert str(report).endswith(f"See it:  {report.url}")


def test_deploy_changes_nothing_the_second_time(client, main):
    def again() -> DeployReport:
        return deploy(
            main,
            work_pool="driver",
            parameters={"steps": 2},
            job_variables={"env": {"A": "b"}},
            cron="0 2 * * *",
            timezone="Europe/Berlin",
            tags=["b", "a"],
        )

    again()
    before = stamps(client)
    report = again()
    assert not report.changed
    assert set(outcomes(report).values()) == {"unchanged"}
    assert stamps(client) == before
    assert len(before) >= 4  # pool, flow, deployment, schedule, and what other tests left in this server


def test_deploy_changes_only_a_parameter_that_differs(client, main):
    deploy(main, work_pool="driver", parameters={"steps": 1, "name": "a"}, cron="0 2 * * *")
    before = stamps(client)
    report = deploy(main, work_pool="driver", parameters={"steps": 2, "name": "a"}, cron="0 2 * * *")
    assert details(report, "deployment") == "parameters.steps: 1 -> 2"
    assert [change.outcome for change in report.changes] == [
        Outcome.UNCHANGED,
        Outcome.CHANGED,
        Outcome.UNCHANGED,
    ]
    after = stamps(client)
    assert {key for key in before if before[key] != after[key]} == {str(report.deployment_id)}


def test_deploy_changes_only_a_cron_that_differs(client, main):
    first = read(client, deploy(main, work_pool="driver", parameters={"steps": 1}, cron="0 2 * * *"))
    before = stamps(client)
    report = deploy(main, work_pool="driver", parameters={"steps": 1}, cron="0 3 * * *")
    assert details(report, "schedule") == "cron `0 2 * * *`, UTC -> cron `0 3 * * *`, UTC"
    after = stamps(client)
    assert {key for key in before if before[key] != after[key]} == {str(first.schedules[0].id)}
    assert crons(client, report) == ["0 3 * * *"]


def test_deploy_leaves_what_it_is_not_told(client, main):
    first = deploy(
        main,
        work_pool="driver",
        parameters={"steps": 5},
        job_variables={"env": {"A": "b"}},
        tags=["a"],
        cron="0 2 * * *",
    )
    before = read(client, first)
    report = deploy(main, work_pool="driver")
    assert not report.changed
    assert read(client, report) == before
    assert details(report, "schedule") == "cron `0 2 * * *`, UTC"


def test_deploy_moves_to_another_pool(client, main):
    deploy(main, work_pool="driver")
    report = deploy(main, work_pool="other")
    assert details(report, "deployment") == "work_pool_name: 'driver' -> 'other'"
    assert read(client, report).work_pool_name == "other"


def test_deploy_follows_the_code(client, write):
    deploy(load_flow(str(write(ONE_FLOW))), work_pool="driver")
    report = deploy(
        load_flow(str(write(ONE_FLOW.replace("Do it.", "Do more.").replace("steps: int", "steps: float")))),
        work_pool="driver",
    )
    lines = details(report, "deployment").splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "version",
        "description",
        "parameter_openapi_schema",
    ]
    assert "description: 'Do it.' -> 'Do more.'" in lines


def test_deploy_keeps_values_of_job_variables_out_of_the_report(client, main):
    deploy(main, work_pool="driver", job_variables={"env": {"KEY": "old-secret"}})
    report = deploy(main, work_pool="driver", job_variables={"env": {"KEY": "new-secret"}})
    assert details(report, "deployment") == "job_variables"
    assert "secret" not in str(report) + json.dumps(report.as_dict())


def test_deploy_takes_parameters_that_json_does_not_have(client, write):
    file = write(
        """
        from datetime import timedelta
        from pathlib import Path
        from prefect import flow
        @flow
        def main(folder: Path, wait: timedelta): ...
        """
    )
    main = load_flow(str(file))

    def again() -> DeployReport:
        return deploy(
            main, work_pool="driver", parameters={"folder": Path("/a"), "wait": timedelta(seconds=90)}
        )

    assert read(client, again()).parameters == {"folder": "/a", "wait": "PT1M30S"}
    assert not again().changed


# ---------------------------------------------------------------- schedules


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"cron": "0 2 * * *"}, id="cron"),
        pytest.param({"cron": "0 2 * * *", "timezone": "Europe/Berlin"}, id="cron with timezone"),
        pytest.param({"interval": 3600}, id="seconds"),
        pytest.param({"interval": timedelta(days=1), "timezone": "America/New_York"}, id="timedelta"),
        pytest.param({"schedule": Interval(60)}, id="schedule"),
        pytest.param({"schedule": RRule("FREQ=DAILY;BYHOUR=3", timezone="UTC")}, id="rrule"),
        pytest.param({"schedule": Cron("0 2 * * *", parameters={"steps": 3}, slug="mine")}, id="parameters"),
    ],
)
def test_schedule_is_made_once(client, main, options):
    assert outcomes(deploy(main, work_pool="driver", **options))["schedule"] == "created"
    before = stamps(client)
    report = deploy(main, work_pool="driver", **options)
    assert outcomes(report)["schedule"] == "unchanged"
    assert len(read(client, report).schedules) == 1
    assert stamps(client) == before


def test_schedule_changes_in_kind_without_a_second_one(client, main):
    deploy(main, work_pool="driver", cron="0 2 * * *")
    report = deploy(main, work_pool="driver", interval=7200)
    assert details(report, "schedule") == "cron `0 2 * * *`, UTC -> every 2:00:00, UTC"
    schedules: list[Any] = [one.schedule for one in read(client, report).schedules]
    assert [schedule.interval for schedule in schedules] == [timedelta(hours=2)]


def test_schedule_changes_its_parameters(client, main):
    deploy(main, work_pool="driver", schedule=Cron("0 2 * * *", parameters={"steps": 1}))
    report = deploy(main, work_pool="driver", schedule=Cron("0 2 * * *", parameters={"steps": 2}))
    assert outcomes(report)["schedule"] == "changed"
    assert read(client, report).schedules[0].parameters == {"steps": 2}


def test_schedule_that_a_plain_deployment_made_is_not_made_again(client, main):
    add_schedule(client, deploy(main, work_pool="driver"), "0 2 * * *")
    report = deploy(main, work_pool="driver", cron="0 2 * * *")
    assert outcomes(report)["schedule"] == "unchanged"
    assert len(read(client, report).schedules) == 1


def test_schedule_of_a_person_stays_beside_ours(client, main):
    first = deploy(main, work_pool="driver", cron="0 2 * * *")
    add_schedule(client, first, "0 12 * * *")
    deploy(main, work_pool="driver", cron="0 3 * * *")
    assert crons(client, first) == ["0 12 * * *", "0 3 * * *"]


def test_schedule_that_a_person_paused_stays_paused(client, main):
    first = deploy(main, work_pool="driver", cron="0 2 * * *")
    ours = read(client, first).schedules[0]
    client.update_deployment_schedule(first.deployment_id, ours.id, active=False)
    report = deploy(main, work_pool="driver", cron="0 3 * * *")
    assert not read(client, report).schedules[0].active
    assert details(report, "schedule").endswith("-> cron `0 3 * * *`, UTC, paused")


def test_schedule_is_paused_on_request(client, main):
    deploy(main, work_pool="driver", cron="0 2 * * *")
    report = deploy(main, work_pool="driver", schedule=Cron("0 2 * * *", active=False))
    assert outcomes(report)["schedule"] == "changed"
    assert not read(client, report).schedules[0].active


def test_schedule_is_removed_on_request_and_a_persons_is_not(client, main):
    first = deploy(main, work_pool="driver", cron="0 2 * * *")
    add_schedule(client, first, "0 12 * * *")
    report = deploy(main, work_pool="driver", schedule=False)
    assert outcomes(report)["schedule"] == "removed"
    assert crons(client, report) == ["0 12 * * *"]
    assert not deploy(main, work_pool="driver", schedule=False).changed


# ---------------------------------------------------------------- what is refused, and what is warned of


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"cron": "often"}, "`cron='often'` is no schedule", id="cron"),
        pytest.param({"interval": -1}, "`interval=-1` is no schedule", id="interval"),
        pytest.param({"interval": "daily"}, "`interval='daily'` is no schedule", id="interval text"),
        pytest.param({"cron": "0 2 * * *", "timezone": "Moon/Base"}, "`timezone='Moon/Base'`", id="timezone"),
        pytest.param({"timezone": "UTC"}, "`timezone='UTC'` belongs to", id="timezone alone"),
        pytest.param(
            {"cron": "0 2 * * *", "interval": 5}, "`cron` and `interval` both say when", id="two schedules"
        ),
        pytest.param({"schedule": Schedule()}, "`schedule` says nothing", id="empty schedule"),
        pytest.param(
            {"parameters": {"step": 1}}, "`main` has no `step`. It takes: `steps`, `name`", id="parameter"
        ),
        pytest.param(
            {"parameters": {"steps": "many"}},
            "do not fit the flow `main`.*'steps'.*'many'",
            id="parameter type",
        ),
        pytest.param({"parameters": {"steps": object()}}, "`parameters`.*JSON", id="parameter not JSON"),
        pytest.param({"job_variables": {"env": object()}}, "`job_variables`.*JSON", id="job variable"),
        pytest.param({"job_variables": {"env": "x"}}, "not accept.*`main/default`.*env", id="wrong variable"),
        pytest.param({"name": "a/b"}, "`name` is 'a/b'", id="name"),
        pytest.param({"work_pool": ""}, "`work_pool` is ''", id="no pool"),
    ],
)
def test_deploy_refuses(client, main, options, message):
    with pytest.raises(SpecError, match=message):
        deploy(main, **{"work_pool": "driver", **options})
    with pytest.raises(ObjectNotFound):
        client.read_deployment_by_name("main/default")


def test_deploy_refuses_what_is_no_flow():
    with pytest.raises(SpecError, match="takes a flow"):
        deploy(step, work_pool="driver")  # pyright: ignore[reportArgumentType]


def test_deploy_warns_of_pools_without_workers_and_says_how_to_start_one(client, main):
    report = deploy(main, work_pool="driver", pools={"my train": "process"})
    assert len(report.warnings) == 2
    assert "`prefect worker start --pool driver`" in report.warnings[0]
    assert "`prefect worker start --pool 'my train'`" in report.warnings[1]


def test_deploy_does_not_warn_of_a_pool_with_a_worker(client, main):
    deploy(main, work_pool="driver")
    for path, body in (("workers/heartbeat", {"name": "worker"}), ("get_scheduled_flow_runs", {})):
        client.request("POST", "/work_pools/driver/" + path, json=body)  # pyright: ignore[reportArgumentType]
    assert deploy(main, work_pool="driver").warnings == ()


def test_deploy_warns_of_a_paused_pool_and_not_of_workers_of_a_push_pool(client, main):
    client.create_work_pool(WorkPoolCreate(name="driver", type="modal:push", is_paused=True))
    pause, code = deploy(main, work_pool="driver").warnings
    assert "`prefect work-pool resume driver`" in pause
    assert "the flow's code has to be in" in code


def test_deploy_warns_of_a_job_variable_that_the_pool_does_not_know(client, main):
    report = deploy(main, work_pool="driver", job_variables={"image": "x"})
    assert any("`driver` of type `process` has no job variable `image`" in one for one in report.warnings)


def test_deploy_warns_of_a_step_that_its_pool_cannot_run(client, write):
    file = write(
        """
        from prefect import flow
        from prefect_torch_elastic import elastic_task
        @elastic_task(work_pool="cluster", nnodes=2)
        def train(): ...
        @flow
        def main():
            train()
        """
    )
    report = deploy(load_flow(str(file)), work_pool="driver", pools={"cluster": "kubernetes"})
    (found,) = [one for one in report.warnings if "step" in one]
    assert found.startswith(
        "The step `train` will fail: `nnodes=2`: work pool `cluster` of type `kubernetes`"
    )


def test_deploy_works_in_an_async_function(client, main):
    async def run() -> DeployReport:
        return deploy(main, work_pool="driver", pools={"train": "process"})

    assert asyncio.run(run()).changed


# ---------------------------------------------------------------- the command line


def test_pairs_are_json_or_text():
    pairs = ["steps=3", "name=abc", 'env={"A": 1}', "url=a=b", "flag=true", "empty="]
    assert parse_pairs(pairs, "--param") == {
        "steps": 3,
        "name": "abc",
        "env": {"A": 1},
        "url": "a=b",
        "flag": True,
        "empty": "",
    }


@pytest.mark.parametrize("pair", ["steps", "=3"])
def test_pairs_without_a_name_are_refused(pair):
    with pytest.raises(UsageError, match=f"`--param {pair}` has no name"):
        parse_pairs([pair], "--param")


def test_command_deploys_and_prints_the_report(client, write, capsys):
    file = write(ONE_FLOW)
    command = ["deploy", f"{file}:main", "--pool", "driver", "-p", "steps=3", "--cron", "0 2 * * *"]
    assert run_command([*command, "--pool-type", "train=kubernetes", "--tag", "a", "--tag", "b"]) == 0
    printed = capsys.readouterr().out
    assert "created    work pool `train`\n             type `kubernetes`" in printed
    assert "prefect deployment run 'main/default'" in printed
    assert run_command([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert not report["changed"]
    deployment = client.read_deployment(report["deployment_id"])
    assert (deployment.parameters, set(deployment.tags)) == ({"steps": 3}, {"a", "b"})


def test_command_says_what_is_wrong(client, write, capsys):
    assert run_command(["deploy", str(write("x = 1")), "--pool", "driver"]) == 1
    assert "has no flow" in capsys.readouterr().err


def test_command_says_that_the_api_is_away(write, capsys):
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api", PREFECT_CLIENT_MAX_RETRIES: 0}):
        assert run_command(["deploy", str(write(ONE_FLOW)), "--pool", "driver"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("Error: Prefect's API at `http://127.0.0.1:9/api` cannot be used: ")
    assert "`prefect server start`" in error
