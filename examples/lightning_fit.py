"""Lightning saves in the background while it trains, and goes on where it ended.

    python examples/lightning_fit.py /mnt/vol/run --epochs 2
    python examples/lightning_fit.py /mnt/vol/run --epochs 4

The second command goes on after the second epoch. A save that failed is raised by the next save,
or at the end of training.
"""

from __future__ import annotations

import argparse
import os

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from slicefs.lightning import AsyncLightningCheckpoint


class LineModel(pl.LightningModule):
    """A line through points."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, _index):
        """The loss of a batch."""
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self):
        """One for all."""
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def main() -> None:
    """Fit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()
    pl.seed_everything(0)
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    last = os.path.join(arguments.folder, "last.ckpt")
    trainer = pl.Trainer(
        accelerator="cpu",
        callbacks=[pl.callbacks.ModelCheckpoint(arguments.folder, save_last=True)],
        enable_progress_bar=False,
        logger=False,
        max_epochs=arguments.epochs,
        plugins=[AsyncLightningCheckpoint()],
    )
    model = LineModel()
    resume = last if os.path.exists(last) else None
    trainer.fit(model, DataLoader(TensorDataset(x, 2 * x + 1), 16), ckpt_path=resume)
    print(f"resumed: {resume is not None}, steps: {trainer.global_step}")


if __name__ == "__main__":
    main()
