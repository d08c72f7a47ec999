"""The phase that a task shows for each state of its child run."""

from __future__ import annotations

import pytest
from prefect.client.schemas.objects import StateType

from prefect_torch_elastic.dispatch.phases import Phase, decide_phase
from prefect_torch_elastic.kubernetes.phases import GangPhase


@pytest.mark.parametrize(
    ("state_type", "state_name", "phase"),
    [
        pytest.param("SCHEDULED", "Late", Phase.WAITING, id="late"),
        pytest.param("PAUSED", "Suspended", Phase.WAITING, id="suspended"),
        pytest.param("PENDING", "Submitting", Phase.STARTING, id="submitting"),
        pytest.param("RUNNING", "Running", Phase.RUNNING, id="running"),
        pytest.param("CANCELLING", "Cancelling", Phase.STOPPING, id="cancelling"),
    ],
)
def test_phase_follows_the_type_of_the_state(state_type, state_name, phase):
    shown, message = decide_phase(state_type, state_name, wait_reason="")
    assert shown is phase
    assert message.endswith(".")


@pytest.mark.parametrize("state_type", ["COMPLETED", "FAILED", "CANCELLED", "CRASHED"])
def test_final_state_shows_no_phase(state_type):
    assert decide_phase(state_type, state_type.capitalize(), wait_reason="no worker")[0] is None


def test_every_state_type_of_prefect_is_understood():
    for state_type in StateType:
        decide_phase(state_type.value, state_type.value.capitalize(), wait_reason="")


def test_reason_of_the_wait_is_the_message_while_no_worker_has_the_run():
    reason = "Pool `train` has no worker."
    assert decide_phase("SCHEDULED", "Late", wait_reason=reason) == (Phase.WAITING, reason)
    assert reason not in decide_phase("RUNNING", "Running", wait_reason=reason)[1]


@pytest.mark.parametrize(
    ("state_type", "name"), [("PENDING", "WaitingForAdmission"), ("RUNNING", "Preempted")]
)
def test_name_that_says_more_than_the_phase_is_in_the_message(state_type, name):
    assert f"`{name}`" in decide_phase(state_type, name, wait_reason="")[1]


@pytest.mark.parametrize("phase", GangPhase)
def test_phase_of_a_gang_is_shown_in_the_words_of_its_worker(phase):
    message = "Queued in `lq` at place 3."
    shown, text = decide_phase("PENDING", str(phase), state_message=message, wait_reason="")
    assert (shown, text) == (phase, message)
    assert isinstance(shown, GangPhase)


def test_phase_of_a_gang_without_a_message_names_itself():
    assert decide_phase("PENDING", "Queued", wait_reason="")[1] == "The gang is Queued."


@pytest.mark.parametrize("state_type", ["SCHEDULED", "RUNNING", "CANCELLING"])
def test_name_of_a_phase_means_no_gang_in_another_type_of_state(state_type):
    assert isinstance(decide_phase(state_type, "Preempted", wait_reason="")[0], Phase)
