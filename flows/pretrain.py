"""Pretrain a small GPT on the source of the Python standard library: one flow, three work pools.

    prefect-torch-elastic dev run flows/pretrain.py                 # three pools of an embedded stack
    prefect-torch-elastic dev run flows/pretrain.py -p kill_at=450  # the last rank is killed at this step
    python flows/pretrain.py                                        # the same steps, all on this machine
    python flows/pretrain.py --steps 20 --nproc 1 --out /tmp/shards

The driver is a flow run in the pool `driver`, the data step runs in `data`, the gang in `train`. The last
line on stdout is one JSON object. Bits per byte below the bigram entropy mean that the model knows more of
the text than which byte tends to follow which.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import place
import text
from prefect import flow
from prefect.cache_policies import INPUTS, TASK_SOURCE

from prefect_torch_elastic import elastic_task, get_context, pool_task

OUT = Path(__file__).resolve().parent.parent / ".demo" / "data"
STEPS = 800
BATCH = 32  # over all ranks
LEARNING_RATE = 4e-3
PROMPT = "def "


@pool_task(work_pool="data", cache_policy=INPUTS + TASK_SOURCE, persist_result=True, log_prints=True)
def tokenize(corpus: str | None, out: str, *, validation_percent: int = 5) -> dict[str, Any]:
    """Turn a folder of Python source into shards of bytes; return their `folder` and the `place` of the work.

    Args:
        corpus: A folder of `.py` files, None for the standard library of the machine this runs on.
        out: Where folders of shards are kept, one for each content.
        validation_percent: How many of 100 files validate, chosen by their names.
    """
    files = text.read_corpus(Path(corpus) if corpus else text.standard_library())
    digest = text.corpus_digest(files, validation_percent=validation_percent)
    folder = Path(out).resolve() / f"python-{digest[:16]}"
    is_new = text.write_shards(files, folder, validation_percent=validation_percent)
    sizes = {split: f"{size / 1e6:.2f} MB" for split, size in text.read_manifest(folder).bytes.items()}
    print(f"{'Wrote' if is_new else 'Reused'} the shards of {len(files)} files in {folder}: {sizes}")
    return {"folder": str(folder), "place": place.here()}


@elastic_task(nproc_per_node=2, work_pool="train", checkpoint={"every_steps": 100})
def train(shards: str, *, steps: int, seed: int = 0, kill_at: int | None = None) -> dict[str, Any]:
    """Train on all ranks; return rank 0's account: validation bits per byte, a sample, what it took.

    Args:
        shards: The folder that `tokenize` wrote.
        steps: Optimizer steps.
        seed: Of weights, batches and sample.
        kill_at: After this step the last rank kills itself, once, as a machine would that goes away.
    """
    import gpt
    import torch

    context = get_context()
    context.init_process_group()
    rank, world_size, device = context.rank, context.world_size, context.device
    started = time.monotonic()
    tokens, validation = (gpt.map_tokens(f"{shards}/{split}.bin") for split in ("train", "validation"))
    torch.manual_seed(seed)
    model = gpt.GPT().to(device)
    parallel = context.prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    state = {"model": model, "optimizer": optimizer}
    resumed_at = context.checkpoint.load(state)

    def validate(stride: int) -> float:
        with context.phase("evaluate"):
            return gpt.bits_per_byte(
                model, validation, device, rank=rank, world_size=world_size, stride=stride
            )

    for step in range(resumed_at, steps):
        rate = gpt.learning_rate(step, steps=steps, peak=LEARNING_RATE)
        starts = gpt.draw_starts(tokens, batch=BATCH, seed=seed, step=step, rank=rank, world_size=world_size)
        batch = gpt.windows(tokens, starts, device)
        loss = gpt.train_step(parallel, optimizer, *batch, rate=rate)
        metrics = {"train_bits_per_byte": loss, "learning_rate": rate}
        if (step + 1) % 100 == 0 and step + 1 < steps:
            metrics["val_bits_per_byte"] = validate(stride=8)
            if rank == 0:
                print(f"step {step + 1}/{steps}: {metrics['val_bits_per_byte']:.3f} bits per byte")
        context.report(metrics, step=step + 1, total_steps=steps)
        context.checkpoint.save_if_due(state, step=step + 1)
        if step + 1 == kill_at and rank == world_size - 1 and context.restart_count == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    score = validate(stride=1)
    return {
        "val_bits_per_byte": score,
        "sample": gpt.generate(model, PROMPT, device, length=300, seed=seed) if rank == 0 else "",
        "world_size": world_size,
        "restarts": context.restart_count,
        "resumed_at_step": resumed_at,
        "train_seconds": round(time.monotonic() - started, 1),
        "place": place.here(),
    }


@flow(log_prints=True)
def pretraining(
    *,
    steps: int = STEPS,
    out: str = str(OUT),
    corpus: str | None = None,
    nproc: int = 2,
    seed: int = 0,
    kill_at: int | None = None,
    in_pools: bool = True,
) -> dict[str, Any]:
    """Tokenize, train, and set the validation loss beside what byte statistics of the same text reach.

    Args:
        steps: Optimizer steps.
        out: Where shards are kept.
        corpus: A folder of `.py` files, None for the standard library.
        nproc: Ranks.
        seed: Of weights, batches and sample.
        kill_at: After this step the last rank kills itself.
        in_pools: Whether the steps run in their work pools, or all here.
    """
    started = time.monotonic()
    data, gang = tokenize, train.with_options(nproc_per_node=nproc)
    if not in_pools:
        data, gang = data.with_options(work_pool=None), gang.with_options(work_pool=None)
    done = data(corpus, out, return_state=True)
    shards = done.result()
    report = gang(shards["folder"], steps=steps, seed=seed, kill_at=kill_at)
    validation = text.map_shard(Path(shards["folder"]) / "validation.bin")
    places = {"driver": place.here(), "data": shards["place"], "train": report.pop("place")}
    report |= place.describe(places) | {
        "data_was_cached": done.name == "Cached",
        "unigram_bits_per_byte": text.unigram_entropy(validation),
        "bigram_bits_per_byte": text.bigram_entropy(validation),
        "validation_bytes": len(validation),
        "steps": steps,
        "seconds": round(time.monotonic() - started, 1),
    }
    print(f"\n--- sample ---\n{report.pop('sample')}\n--------------\n")
    for name in ("unigram", "bigram", "val"):
        print(f"{name:>8}: {report[f'{name}_bits_per_byte']:.3f} bits per byte")
    return report


def main() -> None:
    """Run the flow here and print its report; the last line is for programs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--out", default=str(OUT), help="where shards are kept (default: .demo/data)")
    parser.add_argument("--corpus", help="a folder of .py files (default: the standard library)")
    parser.add_argument("--nproc", type=int, default=2, help="ranks on this machine (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and sample")
    parser.add_argument("--kill-at", type=int, help="kill the last rank after this step, once")
    given = parser.parse_args()
    report = pretraining(
        steps=given.steps,
        out=given.out,
        corpus=given.corpus,
        nproc=given.nproc,
        seed=given.seed,
        kill_at=given.kill_at,
        in_pools=False,
    )
    print(json.dumps(report))


if __name__ == "__main__":
    main()
