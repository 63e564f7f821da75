"""A GPT, sharded over all ranks, that saves while it trains and goes on after a kill.

    torchrun --nproc-per-node 2 examples/gpt_checkpoints.py /mnt/vol/run --steps 20
    torchrun ... examples/gpt_checkpoints.py redis://localhost/1#run --size gpt2

URL is a directory, a mount, s3://BUCKET/PREFIX or a volume without a mount, META-URL#PATH. Start
it again, on any number of ranks: it goes on after the newest step that is whole. Batches are made
from the number of the step, so a loss does not depend on where a run was interrupted.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from slicefs.torch import CheckpointManager

WORDS, CONTEXT, BATCH = 256, 32, 4
SIZES = {"tiny": (2, 64, 4), "gpt2": (12, 768, 12), "gpt2-xl": (48, 1600, 25)}


class Gpt(nn.Module):
    """Layers with causal attention."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, WORDS)

    def forward(self, text):
        """The next word, for each place."""
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.words(text) + self.places(torch.arange(length))
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def batch(step: int, rank: int) -> torch.Tensor:
    """Text of one rank: each word is the one before it plus a number of the line."""
    source = torch.Generator().manual_seed(1000 * step + rank)
    first, by = torch.randint(WORDS, (2, BATCH, 1), generator=source)
    return (first + by % 7 * torch.arange(CONTEXT + 1)) % WORDS


def train(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """One step; the loss of all ranks."""
    text = batch(step, dist.get_rank())
    answer = model(text[:, :-1])
    loss = nn.functional.cross_entropy(answer.flatten(0, 1), text[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total = loss.detach()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def main() -> None:
    """Resume, train, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=2)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Gpt(*SIZES[arguments.size])
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    manager = CheckpointManager(arguments.url, keep_last=2)
    done = 0
    if manager.latest() is not None:
        weights, moments = get_state_dict(model, optimizer)
        done = manager.load({"model": weights, "optimizer": moments})
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    say(f"begins after step {done}")
    for step in range(done + 1, arguments.steps + 1):
        loss = train(step, model, optimizer)
        say(f"step {step}: loss {loss:.6f}")
        if step % arguments.save_every == 0:
            weights, moments = get_state_dict(model, optimizer)
            manager.save(step, {"model": weights, "optimizer": moments}, async_=True)
    manager.close()  # waits for the last save, and raises what it failed with
    dist.barrier()
    dist.destroy_process_group()


def say(line: str) -> None:
    """Print on one rank."""
    if dist.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
