"""From evidence to verdict: who failed first, of what, and what to do."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from prefect_torch_elastic.diagnosis import (
    INFRASTRUCTURE,
    NEVER_AGAIN,
    diagnose,
    diagnose_lost_launcher,
    diagnose_lost_node,
    diagnose_run_timeout,
    diagnose_setup,
)
from prefect_torch_elastic.evidence import Category, Diagnosis, RankEvidence, parse_diagnosis
from prefect_torch_elastic.explanations import CURES, render_exit, render_failure

FAILURES_PAGE = Path(__file__).parents[1] / "docs" / "failures.md"

# What ranks really raise when a peer has gone: texts of torch 2.13, gloo and NCCL.
PEER_LOST = {
    "gloo-closed": (
        "RuntimeError",
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3",
    ),
    "gloo-reset": (
        "RuntimeError",
        "[../gloo/transport/tcp/pair.cc:534] Read error [127.0.0.1]:1: Connection reset by peer",
    ),
    "gloo-write": ("RuntimeError", "writev [127.0.0.1]:5: Broken pipe"),
    "nccl-remote": (
        "DistBackendError",
        "NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error, NCCL "
        "version 2.27.5\nncclRemoteError: A call failed possibly due to a network error or a remote process "
        "exiting prematurely.\nLast error:\nsocketProgress: Connection closed by remote peer host<5>",
    ),
    "nccl-system": (
        "DistBackendError",
        "NCCL error in: NCCLUtils.cpp:94, unhandled system error (run with NCCL_DEBUG=INFO for details)",
    ),
    "nccl-aborted": (
        "DistBackendError",
        "NCCL communicator was aborted on rank 1. Original reason for failure was: rank 0 is gone",
    ),
    "store-recv": (
        "DistNetworkError",
        "failed to recv, got 0 bytes. Connection was likely closed. Did the remote server crash?",
    ),
}
TIMEOUTS = {
    "gloo": (
        "RuntimeError",
        "[.../unbound_buffer.cc:86] Timed out waiting 8000ms for recv operation to complete",
    ),
    "gloo-pair": (
        "RuntimeError",
        "[../gloo/transport/tcp/unbound_buffer.cc:81] Application timeout caused pair closure",
    ),
    "nccl": (
        "DistBackendError",
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE, "
        "Timeout(ms)=20000) ran for 20012 milliseconds before timing out.",
    ),
    "monitored-barrier": (
        "RuntimeError",
        "Rank 0 timed out in monitoredBarrier after 8000 ms.\nNo ranks successfully processed in barrier.",
    ),
    "store": ("DistStoreError", "wait timeout after 8000ms, keys: /worker/1"),
    "store-connect": (
        "DistNetworkError",
        "The client socket has timed out after 60000ms while trying to connect to (127.0.0.1, 29500).",
    ),
}


def rank(number: int = 1, *, failed_at: float | None = 10.0, **fields):
    """Return the evidence on a rank that failed; two ranks per node."""
    values = {"local_rank": number % 2, "node_rank": 0, **fields}
    return RankEvidence(rank=number, failed_at=failed_at, **values)


def healthy(number=0, **fields):
    return rank(number, failed_at=None, **fields)


def raised(kind="ValueError", message="lr must be > 0", number=1, **fields):
    return rank(number, exit_code=1, exc_type=kind, exc_message=message, **fields)


def killed(number=1, signal=9, **fields):
    return rank(number, signal=signal, **fields)


# ---------------------------------------------------------------- categories

BY_CATEGORY = {
    Category.USER_ERROR: [raised()],
    Category.NON_RETRYABLE: [raised("NonRetryable", "bad data", non_retryable=True)],
    Category.DEVICE_OUT_OF_MEMORY: [
        raised("OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 GiB."),
        raised("AcceleratorError", "CUDA error: out of memory"),
    ],
    Category.HOST_OUT_OF_MEMORY: [killed(oom_killed=True), raised("MemoryError", "")],
    Category.KILLED: [
        killed(),
        killed(oom_killed=False),
        killed(signal=15),
        killed(signal=2),
        killed(signal=1),
    ],
    Category.SHARED_MEMORY: [
        killed(signal=7),
        raised(
            "RuntimeError",
            "DataLoader worker (pid 17) is killed by signal: Bus error. It is possible that dataloader's "
            "workers are out of shared memory. Please try to raise your shared memory limit.",
        ),
        raised("RuntimeError", "unable to write to file </torch_17_1>: No space left on device (28)"),
    ],
    Category.CRASHED: [killed(signal=11), killed(signal=6), killed(signal=4), killed(signal=8)],
    Category.EXITED_EARLY: [rank(exit_code=0), rank(exit_code=3)],
    Category.STOPPED_RESPONDING: [killed(reason="was stopped (SIGSTOP or a debugger) for 5 s")],
    Category.COLLECTIVE_TIMEOUT: [raised(*text) for text in TIMEOUTS.values()],
    Category.PEER_LOST: [raised(*text) for text in PEER_LOST.values()],
    Category.RESULT_NOT_SENDABLE: [
        raised("TransferError", "rank 0 returned a function", number=0, stage="result")
    ],
    Category.CALL_NOT_LOADABLE: [raised("ModuleNotFoundError", "No module named 'x'", stage="load")],
}
OF_OTHERS = {Category.SETUP_FAILED, Category.NODE_LOST, Category.LAUNCHER_LOST, Category.TIMED_OUT}
OF_HANGS = {Category.HANG, Category.COLLECTIVES_APART, Category.STUCK_SAVE}


@pytest.mark.parametrize(
    ("evidence", "category"),
    [
        pytest.param(evidence, category, id=f"{category}-{index}")
        for category, examples in BY_CATEGORY.items()
        for index, evidence in enumerate(examples)
    ],
)
def test_evidence_gives_category_rank_and_cure(evidence, category):
    verdict = diagnose([healthy(1 - evidence.rank), evidence])
    assert verdict.category == category
    assert (verdict.rank, verdict.local_rank, verdict.node_rank) == (evidence.rank, evidence.local_rank, 0)
    assert verdict.summary.startswith(f"rank {evidence.rank} ")
    assert verdict.cure == CURES[category]
    assert verdict.non_retryable == (category in NEVER_AGAIN)
    assert render_failure(verdict, restarts=0).splitlines()[:2] == [verdict.summary, verdict.cure]


def test_every_category_can_be_reached():
    assert set(BY_CATEGORY) | OF_OTHERS | OF_HANGS == set(Category)


def test_every_category_has_a_cure_of_its_own():
    assert set(CURES) == set(Category)
    assert len(set(CURES.values())) == len(Category)
    assert all(cure.endswith(".") for cure in CURES.values())


def test_failures_page_lists_the_categories_of_the_enum():
    headings = re.findall(r"^## (\w+)$", FAILURES_PAGE.read_text(), re.MULTILINE)
    assert headings == [str(category) for category in Category]


# ---------------------------------------------------------------- culprit and victims


@pytest.mark.parametrize("text", PEER_LOST.values(), ids=list(PEER_LOST))
def test_victim_that_raised_before_the_killed_rank_was_reaped_is_not_blamed_c003(text):
    victim = raised(*text, number=0, failed_at=9.9)
    verdict = diagnose([victim, killed(1, failed_at=10.0)])
    assert (verdict.rank, verdict.category, verdict.victims) == (1, Category.KILLED, [0])


OF_ANYBODY = {
    "refused": ("ConnectionRefusedError", "[Errno 111] Connection refused"),
    "reset": ("ConnectionResetError", "[Errno 104] Connection reset by peer"),
    "timeout": ("RuntimeError", "the request timed out"),
}


@pytest.mark.parametrize("text", OF_ANYBODY.values(), ids=list(OF_ANYBODY))
def test_victim_whose_message_could_be_anybodys_is_known_by_torchs_frames_c003(text):
    frames = '  File "/lib/torch/distributed/distributed_c10d.py", line 1, in barrier\n'
    victim = raised(*text, number=0, failed_at=9.9, traceback=frames)
    verdict = diagnose([victim, killed(1, failed_at=10.0)])
    assert (verdict.rank, verdict.category, verdict.victims) == (1, Category.KILLED, [0])


@pytest.mark.parametrize("text", OF_ANYBODY.values(), ids=list(OF_ANYBODY))
def test_error_of_the_users_own_connection_is_the_users(text):
    frames = '  File "/home/me/train.py", line 3, in download\n'
    verdict = diagnose([raised(*text, number=0, failed_at=9.9, traceback=frames), raised(failed_at=10.0)])
    assert (verdict.rank, verdict.category) == (0, Category.USER_ERROR)


@pytest.mark.parametrize("text", TIMEOUTS.values(), ids=list(TIMEOUTS))
def test_rank_that_waited_for_a_peer_is_not_blamed_for_its_error_c001(text):
    verdict = diagnose([raised(*text, number=0, failed_at=9.0), raised(failed_at=10.0)])
    assert (verdict.rank, verdict.category) == (1, Category.USER_ERROR)


def test_first_failure_is_the_culprit_c001():
    verdict = diagnose([raised("KeyError", "'x'", number=0, failed_at=10.2), raised(failed_at=10.1)])
    assert (verdict.rank, verdict.exc_type) == (1, "ValueError")
    assert verdict.summary == "rank 1 failed: ValueError: lr must be > 0"


def test_rank_that_was_told_to_stop_is_never_blamed():
    stopped = killed(0, signal=15, failed_at=1.0, told_to_stop=True)
    verdict = diagnose([stopped, raised(failed_at=2.0)])
    assert (verdict.rank, verdict.victims) == (1, [0])


@pytest.mark.parametrize(
    ("error", "words"),
    [
        pytest.param(TIMEOUTS["gloo"], "timed out", id="timeout"),
        pytest.param(PEER_LOST["gloo-closed"], "lost its peer", id="lost-peer"),
    ],
)
def test_rank_that_waited_for_one_that_had_returned_is_no_culprit_c069(error, words):
    verdict = diagnose(
        [rank(number=0, exit_code=0, failed_at=None, returned_at=0.5), raised(*error, number=1)]
    )
    assert verdict.category is Category.COLLECTIVES_APART
    assert (verdict.rank, verdict.victims) == (0, [1])
    assert verdict.summary.startswith(
        f"rank 1 {words} in a collective; rank 0 had already finished: RuntimeErr"
    )
    assert error[1].splitlines()[0] in verdict.summary


def test_rank_that_returned_after_the_failure_is_not_blamed_c069():
    late = rank(number=0, exit_code=0, failed_at=None, returned_at=1000.0)
    assert diagnose([late, raised(*PEER_LOST["gloo-closed"], number=1)]).category is Category.PEER_LOST


def test_rank_that_returned_is_not_blamed_for_an_error_of_the_user():
    back = rank(number=0, exit_code=0, failed_at=None, returned_at=0.5)
    assert diagnose([back, raised("ValueError", "bad", number=1)]).category is Category.USER_ERROR


def test_gang_in_which_only_told_ranks_ended_blames_nobody():
    verdict = diagnose([killed(0, told_to_stop=True), killed(1, told_to_stop=True)])
    assert (verdict.category, verdict.rank) == (Category.SETUP_FAILED, None)
    assert "please report it" in verdict.cure


def test_first_victim_is_named_when_there_are_only_victims():
    text = PEER_LOST["gloo-closed"]
    verdict = diagnose([raised(*text, number=0, failed_at=3.0), raised(*text, number=1, failed_at=2.0)])
    assert (verdict.rank, verdict.category) == (1, Category.PEER_LOST)
    assert "look at the logs of the other ranks" in verdict.cure


def test_error_of_the_user_that_speaks_of_connections_is_no_peer_lost():
    for text in [("OperationalError", "connection refused: database is away"), OF_ANYBODY["refused"]]:
        assert diagnose([raised(*text)]).category is Category.USER_ERROR


def test_timeout_of_something_else_is_no_collective_timeout():
    verdict = diagnose([raised("RuntimeError", "download timed out after 30 s")])
    assert verdict.category is Category.USER_ERROR


def test_rank_that_nccls_watchdog_ended_is_a_victim():
    line = (
        "[rank0]:[E1129 ProcessGroupNCCL.cpp:629] [Rank 0] Watchdog caught collective operation timeout: Work"
    )
    ended = killed(0, signal=6, failed_at=9.0, last_lines=["step 3", line])
    assert diagnose([ended, raised(failed_at=10.0)]).rank == 1
    assert diagnose([ended, healthy(1)]).category is Category.COLLECTIVE_TIMEOUT


# ---------------------------------------------------------------- words


def test_killed_rank_is_explained_without_a_counter_c003():
    verdict = diagnose([healthy(), killed(memory_limit_bytes=2 << 30)])
    assert verdict.summary == (
        "rank 1 was killed by SIGKILL (often out of memory; host memory limit was 2.0 GiB)."
    )
    assert (verdict.signal, verdict.rank, verdict.exit_code) == (9, 1, None)


def test_killed_rank_is_explained_when_the_counter_rose_c003():
    verdict = diagnose([killed(oom_killed=True, memory_limit_bytes=512 << 20)])
    assert verdict.summary == (
        "rank 1 was killed by SIGKILL: the kernel's out-of-memory killer did it "
        "(host memory limit was 0.5 GiB)."
    )
    assert "Ask for more `memory`" in verdict.cure


def test_killed_rank_is_explained_when_the_counter_did_not_rise_c003():
    verdict = diagnose([killed(oom_killed=False)])
    assert "(somebody sent it: the kernel's out-of-memory counter did not rise;" in verdict.summary
    assert verdict.category is Category.KILLED


def test_killed_rank_without_a_limit_says_so_c003():
    assert "the host has no memory limit for it" in diagnose([killed()]).summary


def test_bus_error_names_shared_memory_c044():
    verdict = diagnose([killed(signal=7)])
    assert verdict.summary == "rank 1 was killed by SIGBUS (often a full /dev/shm)."
    assert "`shm_size`" in verdict.cure


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (11, "SIGSEGV (a memory error in native code)."),
        (6, "SIGABRT (native code gave up; its last words are in the log)."),
        (15, "SIGTERM."),
        (64, "SIGRTMAX."),
        (40, "signal 40."),
    ],
)
def test_signal_is_named(number, words):
    assert diagnose([killed(signal=number)]).summary == f"rank 1 was killed by {words}"


def test_exit_with_code_zero_is_a_failure_that_says_what_happened():
    verdict = diagnose([rank(exit_code=0, step=4)])
    assert verdict.summary == "rank 1 ended with exit code 0 at step 4 before its function returned."
    assert "os._exit" in verdict.cure


def test_step_is_in_the_first_line():
    assert diagnose([raised(step=7)]).summary == "rank 1 failed at step 7: ValueError: lr must be > 0"
    assert diagnose([killed(step=7)]).summary.startswith("rank 1 was killed by SIGKILL at step 7 (")


def test_node_is_named_when_there_are_several():
    verdict = diagnose([healthy(0), raised(number=3, node_rank=1)])
    assert verdict.summary == "rank 3 (node 1) failed: ValueError: lr must be > 0"
    assert verdict.node_rank == 1


def test_only_the_first_line_of_a_long_message_is_in_the_summary():
    verdict = diagnose([raised("RuntimeError", "\nNCCL is unhappy\nand says more\n")])
    assert verdict.summary == "rank 1 failed: RuntimeError: NCCL is unhappy"
    assert verdict.exc_message == "\nNCCL is unhappy\nand says more\n"


def test_exception_without_a_message_has_no_colon_at_its_end():
    assert diagnose([raised("KeyboardInterrupt", "")]).summary == "rank 1 failed: KeyboardInterrupt"


def test_call_that_cannot_be_loaded_is_said_as_such():
    verdict = diagnose([raised("ModuleNotFoundError", "No module named 'x'", stage="load")])
    assert verdict.summary == "rank 1 could not load the call: ModuleNotFoundError: No module named 'x'"
    assert verdict.non_retryable


def test_result_that_cannot_be_sent_speaks_for_itself_c006():
    text = "rank 0 returned a value (`function`) that cannot be sent to the flow: …"
    assert diagnose([raised("TransferError", text, number=0, stage="result")]).summary == text


def test_result_that_cannot_be_written_names_rank_and_reason():
    evidence = raised("OSError", "[Errno 28] No space left on device", number=0, stage="result")
    assert diagnose([evidence]).summary == (
        "rank 0 could not hand back its result: OSError: [Errno 28] No space left on device"
    )


def test_error_of_the_listed_kinds_ends_all_retries():
    verdict = diagnose([raised(non_retryable=True)])
    assert (verdict.category, verdict.non_retryable) == (Category.NON_RETRYABLE, True)


# ---------------------------------------------------------------- verdicts on what is no rank


def test_lost_node_is_named():
    verdict = diagnose_lost_node(1, reason="its agent died (SIGKILL)")
    assert verdict.summary == "node 1 was lost: its agent died (SIGKILL)."
    assert (verdict.category, verdict.node_rank, verdict.non_retryable) == (Category.NODE_LOST, 1, False)


def test_run_that_took_too_long_names_the_field():
    verdict = diagnose_run_timeout(90.5)
    assert verdict.summary == "the gang ran longer than `run_timeout_seconds=90.5` and was stopped."
    assert (verdict.category, verdict.rank) == (Category.TIMED_OUT, None)


def test_setup_failure_that_may_pass_is_tried_again():
    verdict = diagnose_setup("asked for 2 GPUs, 1 of 3 are free (0)", may_pass=True)
    assert not verdict.non_retryable


def test_setup_failure_is_never_tried_again():
    verdict = diagnose_setup("asked for 2 GPUs, 1 of 3 are free (0)", node_rank=0)
    assert (verdict.category, verdict.node_rank, verdict.non_retryable) == (Category.SETUP_FAILED, 0, True)


@pytest.mark.parametrize(
    ("code", "words", "exit_code", "signal"),
    [
        (-9, "SIGKILL", None, 9),
        (70, "exit code 70", 70, None),
        (0, "exit code 0", 0, None),
    ],
)
def test_lost_launcher_says_how_it_ended(code, words, exit_code, signal):
    verdict = diagnose_lost_launcher(code)
    assert f"died ({words})" in verdict.summary
    assert (verdict.exit_code, verdict.signal) == (exit_code, signal)
    assert verdict.category in INFRASTRUCTURE


def test_launcher_that_failed_by_itself_is_quoted():
    verdict = diagnose_lost_launcher(1, last_words="ImportError: no libtorch")
    assert "died (exit code 1: ImportError: no libtorch)" in verdict.summary


@pytest.mark.parametrize(("code", "words"), [(0, "exit code 0"), (3, "exit code 3"), (-15, "SIGTERM")])
def test_exit_status_in_words(code, words):
    assert render_exit(code) == words


# ---------------------------------------------------------------- text and travel


def test_failure_text_has_traceback_and_log():
    verdict = diagnose([raised(traceback="Traceback\n  train.py, line 3\n", log="/runs/rank-1.log")])
    assert render_failure(verdict, restarts=2).splitlines() == [
        "rank 1 failed: ValueError: lr must be > 0",
        "Mend the function where the traceback points and run the task again.",
        "It was restarted 2 times before.",
        "",
        "On rank 1:",
        "Traceback",
        "  train.py, line 3",
        "",
        "Full log of the rank: /runs/rank-1.log",
    ]


def test_failure_text_has_the_last_lines_when_there_is_no_traceback():
    text = render_failure(diagnose([killed(last_lines=[f"line {n}" for n in range(30)])]), restarts=1)
    assert "It was restarted 1 time before." in text
    assert text.endswith("\n".join(["Last lines of rank 1:", *(f"line {n}" for n in range(20, 30))]))


def test_diagnosis_survives_the_way_as_json():
    verdict = diagnose([raised(step=3, traceback="Traceback", last_lines=["a"]), healthy()])
    back = parse_diagnosis(json.loads(json.dumps(asdict(verdict))))
    assert back == verdict
    assert isinstance(back, Diagnosis)
    assert back.category is Category.USER_ERROR
