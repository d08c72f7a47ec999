"""Kill a rank and then the whole gang in the middle of a run, and compare with a run that nobody disturbed.

    python flows/resume_after_kill.py
    python flows/resume_after_kill.py --steps 120 --every 20

The last line on stdout is one JSON object. `identical` is true when both runs end with the same weights and
optimizer state, bit for bit: every resumed step saw the same samples and drew the same random numbers.
"""

import argparse
import hashlib
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from prefect import flow

from prefect_torch_elastic import elastic_task, get_context

Kills = dict[int, str]  # completed steps -> "rank" or "gang"


@elastic_task(nproc_per_node=2, max_restarts=1, max_attempts=2)
def train(steps: int, *, kills: Kills, marks: str) -> dict[str, Any]:
    """Train a small network with dropout on shuffled samples; return a digest of what came out."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    context = get_context()
    torch.manual_seed(7)
    inputs = torch.randn(1000, 16)
    dataset = TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))
    loader = context.prepare_data_loader(DataLoader(dataset, batch_size=16, shuffle=True))
    model = context.prepare_model(
        nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}

    step = started_at = context.checkpoint.load(state)
    while step < steps:
        for samples, targets in loader:
            nn.functional.mse_loss(model(samples), targets).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            context.report({}, step=step, total_steps=steps)
            context.checkpoint.save_if_due(state, step=step)
            if step in kills:
                context.checkpoint.wait()  # a kill during the upload would cost one interval more
                kill_once(kills[step], Path(marks) / f"killed-at-{step}")
            if step == steps:
                break
    digest = hashlib.sha256()
    for value in [*model.state_dict().values(), *flatten(optimizer.state_dict())]:
        digest.update(torch.as_tensor(value).numpy().tobytes())
    return {"digest": digest.hexdigest(), "started_at": started_at, "attempt": context.attempt}


def flatten(state: Any) -> list[Any]:
    """Return the numbers and tensors in the state of an optimizer, in order."""
    if isinstance(state, dict):
        return [leaf for value in state.values() for leaf in flatten(value)]
    if isinstance(state, (list, tuple)):
        return [leaf for value in state for leaf in flatten(value)]
    return [] if state is None else [state]


def kill_once(what: str, mark: Path) -> None:
    """On rank 1, the first time: SIGKILL this rank, or the process above the node's agent and so the gang."""
    if get_context().rank != 1 or mark.exists():
        return
    mark.touch()
    victim = os.getpid() if what == "rank" else parent_of(os.getppid())
    os.kill(victim, signal.SIGKILL)
    time.sleep(60.0)


def parent_of(pid: int) -> int:
    """Return the parent of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@flow
def resume_after_kill(*, steps: int, every: int, folder: str) -> dict[str, Any]:
    """Run once undisturbed and once with two kills, and compare."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    marks = tempfile.mkdtemp(prefix="marks-", dir=folder)
    kills = {steps // 2 - 1: "rank", steps - every - 1: "gang"}  # each just before a save: the most to lose
    task = train.with_options(checkpoint={"every_steps": every, "when_busy": "wait"}, store=folder)
    calm = task(steps, kills={}, marks=marks)
    disturbed = task(steps, kills=kills, marks=marks)
    return {
        "killed_at_steps": list(kills),
        "resumed_at_step": disturbed["started_at"],
        "lost_steps": max(kills) - disturbed["started_at"],
        "attempts": disturbed["attempt"],
        "identical": calm["digest"] == disturbed["digest"],
    }


def main() -> None:
    """Run the flow and print what it found; the last line is for programs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--every", type=int, default=10, help="steps between saves (default: %(default)s)")
    parser.add_argument("--store", default=".demo/runs", help="where runs are kept (default: %(default)s)")
    given = parser.parse_args()
    folder = str(Path(given.store).resolve())
    print(json.dumps(resume_after_kill(steps=given.steps, every=given.every, folder=folder)))


if __name__ == "__main__":
    main()
