"""Trains a small residual network on small image files, one batch of reads for each batch.

    python examples/resnet_loop.py redis://localhost/1#images --make 2000
    python examples/resnet_loop.py /mnt/vol/images --epochs 3 --workers 4

URL is a directory, a mount, s3://BUCKET/PREFIX or a volume without a mount, META-URL#PATH. A file
is one image of raw bytes in the directory of its class; `--make` writes such files first.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch.utils.data import DataLoader

from slicefs import open_tree
from slicefs.torch import MapDataset

SIDE, CHANNELS, CLASSES = 16, 3, 10


class Block(nn.Module):
    """Two convolutions and what goes past them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
        )

    def forward(self, x):
        """A layer's answer."""
        return torch.relu(x + self.body(x))


def network(width: int, blocks: int) -> nn.Module:
    """A ResNet with as many blocks as wanted."""
    return nn.Sequential(
        nn.Conv2d(CHANNELS, width, 3, padding=1),
        *(Block(width) for _ in range(blocks)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, CLASSES),
    )


def decode(sample):
    """An image and its class: what a JPEG decoder would do in a real program."""
    pixels = torch.frombuffer(bytearray(sample.data), dtype=torch.uint8)
    image = pixels.view(CHANNELS, SIDE, SIDE).float() / 255
    return image, int(sample.path.split("/")[0])


def make(url: str, count: int) -> None:
    """Write `count` images; the class decides how bright they are."""
    tree = open_tree(url)

    def write(number: int) -> None:
        label = number % CLASSES
        source = torch.Generator().manual_seed(number)
        noise = torch.randint(80, (CHANNELS * SIDE * SIDE,), generator=source)
        pixels = (noise + 19 * label).to(torch.uint8)
        tree.write_atomic(f"{label}/{number:06}.bin", (pixels.numpy().tobytes(),))

    with ThreadPoolExecutor(8) as threads:  # each file waits for the store
        list(threads.map(write, range(count)))
    tree.close()


def main() -> None:
    """The loop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--make", type=int, default=0, metavar="COUNT")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.make:
        make(arguments.url, arguments.make)
    torch.manual_seed(0)
    dataset = MapDataset(arguments.url, glob="**/*.bin", transform=decode)
    loader = DataLoader(dataset, arguments.batch_size, shuffle=True, num_workers=arguments.workers)
    model = network(arguments.width, arguments.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for epoch in range(arguments.epochs):
        seen, total = 0, 0.0
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += len(images)
            total += loss.item() * len(images)
        print(f"epoch {epoch}: {seen} images, loss {total / seen:.3f}", flush=True)


if __name__ == "__main__":
    main()
