"""A small causal GPT over bytes, its batches, score and sampler. Knows nothing of Prefect or gangs."""

import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (torch's own spelling)
from torch import Tensor, nn

VOCABULARY = 256
CONTEXT = 64
WIDTH = 128
LAYERS = 2
HEADS = 4
REACH = 4  # bytes that the first layer sees at once: saves the many steps until attention looks one back


class Block(nn.Module):
    """Attention, then a two-layer network, each beside a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm_network = nn.LayerNorm(WIDTH)
        wide = 4 * WIDTH
        self.network = nn.Sequential(
            nn.Linear(WIDTH, wide, bias=False), nn.GELU(), nn.Linear(wide, WIDTH, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, time, width] to the same shape."""
        batch, time, _ = x.shape
        heads = self.qkv(self.norm_attention(x)).view(batch, time, 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each [batch, heads, time, width of a head]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, time, WIDTH))
        return x + self.network(self.norm_network(x))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out; input and output share one embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, REACH, groups=WIDTH, padding=REACH - 1, bias=False)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # What is added to the residual stream starts small, so that depth does not change its size.
                added = name.endswith(("out.weight", "network.2.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * LAYERS) if added else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map [batch, time] int64 to logits [batch, time, 256]."""
        time = tokens.shape[1]
        x = self.embedding(tokens)
        x = x + self.mix(x.transpose(1, 2))[..., :time].transpose(1, 2) + self.position.weight[:time]
        return F.linear(self.norm(self.blocks(x)), self.embedding.weight)


def map_tokens(path: str) -> Tensor:
    """Map a shard into memory as [bytes] uint8."""
    return torch.from_file(path, size=os.path.getsize(path), dtype=torch.uint8)


def windows(tokens: Tensor, starts: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, each [len(starts), CONTEXT] int64: the target is the next byte."""
    chunk = tokens[starts[:, None] + torch.arange(CONTEXT + 1)].long().to(device)
    return chunk[:, :-1], chunk[:, 1:]


def draw_starts(tokens: Tensor, *, batch: int, seed: int, step: int, rank: int, world_size: int) -> Tensor:
    """Draw this rank's share of the batch of one step; all ranks together have the same at any world size."""
    generator = torch.Generator().manual_seed((seed << 32) + step)
    return torch.randint(len(tokens) - CONTEXT, (batch,), generator=generator)[rank::world_size]


def learning_rate(step: int, *, steps: int, peak: float) -> float:
    """Return the rate of `step`, counted from 0: a linear warmup, then half a cosine to a twentieth."""
    warmup = min(50, steps // 10 + 1)
    progress = max(0, step - warmup) / max(1, steps - warmup)
    return peak * min(1.0, (step + 1) / warmup) * (0.525 + 0.475 * math.cos(math.pi * progress))


def loss_nats(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of the next byte, in nats."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor, *, rate: float
) -> float:
    """Take one optimizer step and return the loss before it, in bits per byte of this rank's share."""
    optimizer.param_groups[0]["lr"] = rate
    loss = loss_nats(model, inputs, targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item() / math.log(2)


@torch.no_grad()
def bits_per_byte(
    model: nn.Module, tokens: Tensor, device: torch.device, *, rank: int, world_size: int, stride: int = 1
) -> float:
    """Return the model's bits per byte over every `stride`-th window of a text, read by all ranks together.

    With `stride=1` each byte but the first (and a rest shorter than a window) is predicted exactly once.
    """
    starts = torch.arange(0, len(tokens) - CONTEXT, CONTEXT)[::stride]
    total = torch.zeros(2, dtype=torch.float64)  # nats, bytes
    for share in starts[rank::world_size].split(64):
        inputs, targets = windows(tokens, share, device)
        total += torch.tensor([loss_nats(model, inputs, targets).item() * targets.numel(), targets.numel()])
    total = total.to(device)
    dist.all_reduce(total)
    return (total[0] / total[1] / math.log(2)).item()


@torch.no_grad()
def generate(model: nn.Module, prompt: str, device: torch.device, *, length: int, seed: int) -> str:
    """Continue `prompt` by `length` bytes, drawn at temperature 0.7."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt.encode())], device=device)
    for _ in range(length):
        logits = model(tokens[:, -CONTEXT:])[0, -1].float().cpu()
        drawn = torch.multinomial(F.softmax(logits / 0.7, dim=-1), 1, generator=generator)
        tokens = torch.cat([tokens, drawn.to(device)[None]], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")
