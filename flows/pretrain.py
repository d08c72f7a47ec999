"""Pretrain a small GPT on the source of the Python standard library: data, train and driver in one flow.

    python flows/pretrain.py
    python flows/pretrain.py --steps 20 --nproc 1 --out /tmp/shards

The last line on stdout is one JSON object. Bits per byte below the bigram entropy mean that the model
knows more of the text than which byte tends to follow which.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import text
from prefect import flow, task

from prefect_torch_elastic import elastic_task, get_context

OUT = Path(__file__).resolve().parent.parent / ".demo" / "data"
STEPS = 800
BATCH = 32  # over all ranks
LEARNING_RATE = 4e-3
PROMPT = "def "


@task(log_prints=True)
def tokenize(corpus: str | None, out: str, *, validation_percent: int = 5) -> str:
    """Turn a folder of Python source into shards of bytes and return their folder; equal text is done once.

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
    return str(folder)


@elastic_task(nproc_per_node=2)
def train(shards: str, *, steps: int, seed: int = 0) -> dict[str, Any]:
    """Train on all ranks; return rank 0's account: validation bits per byte, a sample, what it took."""
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

    def validate(stride: int) -> float:
        with context.phase("evaluate"):
            return gpt.bits_per_byte(
                model, validation, device, rank=rank, world_size=world_size, stride=stride
            )

    for step in range(steps):
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

    score = validate(stride=1)
    return {
        "val_bits_per_byte": score,
        "sample": gpt.generate(model, PROMPT, device, length=300, seed=seed) if rank == 0 else "",
        "world_size": world_size,
        "restarts": context.restart_count,
        "train_seconds": round(time.monotonic() - started, 1),
    }


@flow
def pretraining(
    *, steps: int = STEPS, out: str = str(OUT), corpus: str | None = None, nproc: int = 2, seed: int = 0
) -> dict[str, Any]:
    """Tokenize, train, and set the validation loss beside what byte statistics of the same text reach."""
    started = time.monotonic()
    shards = tokenize(corpus, out)
    report = train.with_options(nproc_per_node=nproc)(shards, steps=steps, seed=seed)
    validation = text.map_shard(Path(shards) / "validation.bin")
    return report | {
        "unigram_bits_per_byte": text.unigram_entropy(validation),
        "bigram_bits_per_byte": text.bigram_entropy(validation),
        "validation_bytes": len(validation),
        "steps": steps,
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> None:
    """Run the flow and print its report; the last line is for programs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--out", default=str(OUT), help="where shards are kept (default: .demo/data)")
    parser.add_argument("--corpus", help="a folder of .py files (default: the standard library)")
    parser.add_argument("--nproc", type=int, default=2, help="ranks on this machine (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and sample")
    given = parser.parse_args()
    report = pretraining(
        steps=given.steps, out=given.out, corpus=given.corpus, nproc=given.nproc, seed=given.seed
    )
    print(f"\n--- sample ---\n{report.pop('sample')}\n--------------\n")
    for name in ("unigram", "bigram", "val"):
        print(f"{name:>8}: {report[f'{name}_bits_per_byte']:.3f} bits per byte")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
