"""Lightning's trainer saves and resumes through our plugins; a failed save is raised."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from slicefs.checkpoint.files import Checkpoint
from slicefs.lightning import AsyncLightningCheckpoint, LightningCheckpoint

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own


class Model(pl.LightningModule):
    """A line."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, _index: int) -> Any:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def trainer(tmp_path: Path, plugin: LightningCheckpoint, epochs: int) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        callbacks=[pl.callbacks.ModelCheckpoint(tmp_path / "ckpt", save_last=True)],
        default_root_dir=tmp_path,
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
        max_epochs=epochs,
        plugins=[plugin],
    )


def data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4)


@pytest.mark.parametrize("plugin", [LightningCheckpoint, AsyncLightningCheckpoint])
def test_a_trainer_saves_and_resumes(tmp_path: Path, plugin: type[LightningCheckpoint]) -> None:
    model = Model()
    trainer(tmp_path, plugin(), 2).fit(model, data())
    last = tmp_path / "ckpt/last.ckpt"
    saved = plugin().load_checkpoint(last, weights_only=False)
    assert torch.equal(saved["state_dict"]["layer.weight"], model.layer.weight)
    again = trainer(tmp_path, plugin(), 3)
    again.fit(Model(), data(), ckpt_path=str(last), weights_only=False)
    assert again.global_step == 6


def test_a_save_is_of_one_moment(tmp_path: Path) -> None:
    plugin = AsyncLightningCheckpoint()
    state = {"w": torch.ones(1_000_000)}
    plugin.save_checkpoint(state, tmp_path / "a.ckpt")
    state["w"].zero_()
    plugin.teardown()
    assert plugin.last_durable == str(tmp_path / "a.ckpt")
    assert plugin.load_checkpoint(tmp_path / "a.ckpt")["w"].sum() == 1_000_000
    plugin.remove_checkpoint(tmp_path / "a.ckpt")
    plugin.remove_checkpoint(tmp_path / "a.ckpt")
    assert os.listdir(tmp_path) == []


def test_a_failed_save_is_raised_once(tmp_path: Path) -> None:
    fail = True

    def opener(url: str) -> Checkpoint:
        if fail:
            raise OSError(28, "No space left on device")
        return Checkpoint(url)

    plugin = AsyncLightningCheckpoint(opener)
    plugin.save_checkpoint({"w": torch.ones(3)}, tmp_path / "a.ckpt")
    with pytest.raises(OSError, match="No space"):
        plugin.teardown()
    plugin.teardown()
    plugin.save_checkpoint({"w": torch.ones(3)}, tmp_path / "b.ckpt")
    fail = False
    with pytest.raises(OSError, match="No space"):
        plugin.save_checkpoint({"w": torch.ones(3)}, tmp_path / "c.ckpt")
    plugin.save_checkpoint({"w": torch.ones(3)}, tmp_path / "d.ckpt")
    plugin.teardown()
    assert os.listdir(tmp_path) == ["d.ckpt"]


@pytest.mark.parametrize("kind", [LightningCheckpoint, AsyncLightningCheckpoint])
def test_a_folder_is_opened_once_and_closed(
    tmp_path: Path, kind: type[LightningCheckpoint]
) -> None:
    events: list[str] = []

    class Watched(Checkpoint):
        """Says when it is opened and closed."""

        def __init__(self, url: str) -> None:
            events.append("open")
            super().__init__(url)

        def close(self) -> None:
            events.append("close")
            super().close()

    plugin = kind(Watched)
    for _ in range(2):
        for name in ("a.ckpt", "b.ckpt"):
            plugin.save_checkpoint({"w": torch.ones(3)}, tmp_path / name)
            assert plugin.load_checkpoint(tmp_path / name)["w"].sum() == 3
        plugin.teardown()
    assert events == ["open", "close"] * 2
