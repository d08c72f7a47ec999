"""Train a small GPT as a gang of two pods that Kueue admits; a preempted one goes on from its checkpoint.

    prefect work-pool create gpu --type torch-elastic     # once; then `prefect worker start --pool gpu`
    prefect-torch-elastic plan flows/gang_on_kueue.py     # what would be created
    python flows/gang_on_kueue.py --image registry.example/train:1 --store s3://bucket/runs
    python flows/gang_on_kueue.py --here --steps 20       # both nodes simulated on this machine

What is not given is what the form of the work pool says. The text is the source of the image's own Python, so
no data has to be mounted. The last line on stdout is one JSON object.
"""

import argparse
import json
from typing import Any

from prefect import flow

from prefect_torch_elastic import elastic_task, get_context


@elastic_task(
    work_pool="gpu", nnodes=2, nproc_per_node=1, cpu="1", memory="2Gi", checkpoint={"every_steps": 50}
)
def train(steps: int) -> dict[str, Any]:
    """Train with one rank in each pod; return the validation loss, and what happened on the way."""
    import gpt
    import text
    import torch

    context = get_context()
    context.init_process_group()
    share = {"rank": context.rank, "world_size": context.world_size}
    corpus = b"".join(text.read_corpus(text.standard_library()).values())
    tokens = torch.frombuffer(bytearray(corpus), dtype=torch.uint8)
    torch.manual_seed(0)
    model = gpt.GPT().to(context.device)
    parallel = context.prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    state = {"model": model, "optimizer": optimizer}
    resumed_at = context.checkpoint.load(state)
    for step in range(resumed_at, steps):
        starts = gpt.draw_starts(tokens[200_000:], batch=32, seed=0, step=step, **share)
        batch = gpt.windows(tokens[200_000:], starts, context.device)
        rate = gpt.learning_rate(step, steps=steps, peak=4e-3)
        loss = gpt.train_step(parallel, optimizer, *batch, rate=rate)
        context.report({"bits_per_byte": loss}, step=step + 1, total_steps=steps)
        context.checkpoint.save_if_due(state, step=step + 1)  # also when the pods are told to go
    score = gpt.bits_per_byte(model, tokens[:200_000], context.device, stride=8, **share)
    counts = {"preemptions": context.preemption_count, "world_size": context.world_size}
    return {"val_bits_per_byte": score, "resumed_at_step": resumed_at, **counts}


@flow
def gang_on_kueue(
    steps: int = 400,
    pool: str | None = "gpu",
    queue: str | None = None,
    image: str | None = None,
    store: str | None = None,
) -> dict[str, Any]:
    """Train in a work pool of type `torch-elastic`, or on this machine with `pool=None`."""
    fields = {k: v for k, v in {"queue": queue, "image": image, "store": store}.items() if v is not None}
    return train.with_options(work_pool=pool, **fields)(steps)


def main() -> None:
    """Run the flow here, which only waits for the gang, and print its report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--pool", default="gpu", help="the work pool (default: %(default)s)")
    parser.add_argument("--here", dest="pool", action="store_const", const=None, help="on this machine")
    for name in ("queue", "image", "store"):
        parser.add_argument(f"--{name}", help=f"the field `{name}` of the gang")
    print(json.dumps(gang_on_kueue(**vars(parser.parse_args()))))


if __name__ == "__main__":
    main()
