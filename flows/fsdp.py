"""Shard a model's weights, gradients and optimizer state over the ranks: FSDP2, on CPUs or GPUs.

python flows/fsdp.py
python flows/fsdp.py --nproc 4 --steps 100
"""

import argparse

from prefect import flow

from prefect_torch_elastic import elastic_task, get_context


@elastic_task(nproc_per_node=2)
def train(*, steps: int) -> dict[str, float]:
    """Fit a small network to a sine; return the first and the last loss and the share of one rank."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    context = get_context()
    context.init_process_group()
    mesh = init_device_mesh(context.device.type, (context.world_size,))
    torch.manual_seed(0)  # the same weights on all ranks, before each keeps its share
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)), nn.Linear(64, 1))
    model.to(context.device)
    weights = sum(parameter.numel() for parameter in model.parameters())
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    shards = [p.to_local() for p in model.parameters() if isinstance(p, DTensor)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    torch.manual_seed(1 + context.rank)  # other samples on each rank
    losses: list[float] = []
    for step in range(steps):
        x = torch.rand(256, 64, device=context.device)
        loss = (model(x).squeeze(-1) - (4 * x[:, 0]).sin()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        context.report({"loss": losses[-1]}, step=step + 1, total_steps=steps)
    share = sum(shard.numel() for shard in shards) / weights
    return {"first_loss": losses[0], "last_loss": losses[-1], "share_of_weights": share}


@flow
def sharded_training(*, nproc: int = 2, steps: int = 60) -> dict[str, float]:
    """Train with sharded weights and say what came of it."""
    return train.with_options(nproc_per_node=nproc)(steps=steps)


def main() -> None:
    """Run the flow and print the losses."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=int, default=2, help="ranks on this machine (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default: %(default)s)")
    arguments = parser.parse_args()
    report = sharded_training(nproc=arguments.nproc, steps=arguments.steps)
    print(f"loss {report['first_loss']:.3f} -> {report['last_loss']:.3f}")
    print(f"rank 0 held {report['share_of_weights']:.0%} of the weights")


if __name__ == "__main__":
    main()
