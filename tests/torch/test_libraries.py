"""Libraries that train with torch's process groups, unchanged: tiny models, no downloads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SAME = """
def same(model):
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return bool((allreduce(flat, Max) == allreduce(flat, Min)).all())
"""
IMPORTS = f"""
import warnings
warnings.filterwarnings("ignore")
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from allranks.collectives import Max, Min
torch.manual_seed(rank)
rows = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
data = TensorDataset(rows, rows.sum(dim=1, keepdim=True))
{SAME}
"""
LIGHTNING = """
import logging
import lightning
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
class Sums(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
    def training_step(self, batch, number):
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False,
             enable_model_summary=False)
trainer = lightning.Trainer(accelerator="cpu", devices=size, strategy="ddp", max_epochs=2, **quiet)
model = Sums()
trainer.fit(model, DataLoader(data, 8))
trainer.world_size, trainer.global_step, same(model)
"""
FABRIC = """
from lightning.fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=size, strategy="ddp")
fabric.launch()
module = nn.Linear(4, 1)
model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
loader = fabric.setup_dataloaders(DataLoader(data, 8))
for x, y in loader:
    optimizer.zero_grad()
    fabric.backward(nn.functional.mse_loss(model(x), y))
    optimizer.step()
fabric.world_size, len(loader), same(module)
"""
TRANSFORMERS = """
import tempfile
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
tiny = dict(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
            intermediate_size=8, max_position_embeddings=8)
model = BertForSequenceClassification(BertConfig(**tiny))
texts = [{"input_ids": torch.arange(8) + i % 8, "labels": torch.tensor(i % 2)} for i in range(48)]
arguments = TrainingArguments(tempfile.mkdtemp(), max_steps=3, per_device_train_batch_size=4,
                              use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
                              logging_strategy="no")
trainer = Trainer(model, arguments, train_dataset=texts)
trainer.train()
trainer.args.world_size, trainer.state.global_step, same(model)
"""
METRICS = """
from torchmetrics.classification import BinaryAccuracy
if not dist.is_initialized():
    dist.init_process_group("gloo")
accuracy = BinaryAccuracy()
# Rank r is right in r of 2 places.
accuracy.update(torch.tensor([1, 1]), torch.tensor([rank > 0, rank > 1]).long())
float(accuracy.compute()) == sum(range(size)) / (2 * size)
"""
CHECKPOINT = """
import tempfile
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
if not dist.is_initialized():
    dist.init_process_group("gloo")
folder = broadcast_object(tempfile.mkdtemp())
torch.manual_seed(1)
saved = nn.Linear(6, 3)
fully_shard(saved, mesh=init_device_mesh("cpu", (size,)))
checkpoint.save(get_model_state_dict(saved), checkpoint_id=folder)
torch.manual_seed(2)
loaded = nn.Linear(6, 3)
fully_shard(loaded, mesh=init_device_mesh("cpu", (size,)))
state = get_model_state_dict(loaded)
checkpoint.load(state, checkpoint_id=folder)
set_model_state_dict(loaded, state)
bool((loaded.weight.full_tensor() == saved.weight.full_tensor()).all())
"""
LOADER = """
from torch.utils.data.distributed import DistributedSampler
loader = DataLoader(data, 4, sampler=DistributedSampler(data, size, rank), num_workers=2)
int(allreduce(sum(len(x) for x, _ in loader), Sum))
"""
END = """
import torch.distributed as dist
from accelerate.state import AcceleratorState
AcceleratorState._reset_state(reset_partial_state=True)
if dist.is_initialized():
    dist.destroy_process_group()
"""
LIBRARIES = {
    "Lightning's Trainer": (LIGHTNING, "ranks 0–2 → (3, 4, True)\n"),
    "Fabric": (FABRIC, "ranks 0–2 → (3, 2, True)\n"),
    "transformers' Trainer": (TRANSFORMERS, "ranks 0–2 → (3, 3, True)\n"),
    "torchmetrics": (METRICS, "ranks 0–2 → True\n"),
    "torch.distributed.checkpoint": (CHECKPOINT, "ranks 0–2 → True\n"),
    "workers of a DataLoader": (LOADER, "ranks 0–2 → 48\n"),
}


@pytest.fixture(autouse=True, scope="module")
def _leaves_nothing(ranks):
    """Other tests use accelerate and groups of their own on the same ranks."""
    yield
    assert ranks.on_ranks(END, timeout=180).status == "ok"


@pytest.mark.parametrize(("cell", "shown"), LIBRARIES.values(), ids=LIBRARIES.keys())
def test_a_library_trains_on_the_ranks(ranks, cell, shown):
    assert ranks.on_ranks(IMPORTS, timeout=180).status == "ok"
    ended = ranks.on_ranks(cell, "--timeout 120", timeout=180)
    assert ended.status == "ok", ended.text
    assert ended.text.endswith(shown), ended.text


# What a rank with a GPU has, here with the one CPU that Lightning sees.
ONE_EACH = """
import os
from unittest.mock import patch
from lightning.fabric.plugins.environments import mpi
from allranks.features.torch_jax import lightning_ranks
with patch.dict(os.environ, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1"), patch.object(
    mpi.MPIEnvironment, "local_rank", mpi.MPIEnvironment.local_rank
):
    lightning_ranks.install(mpi)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, num_nodes=size, strategy="ddp", max_epochs=2, **quiet)
    model = Sums()
    trainer.fit(model, DataLoader(data, 8))
trainer.world_size, trainer.global_step, trainer.global_rank == rank, same(model)
"""


def test_lightning_takes_the_one_gpu_that_each_rank_sees(ranks):
    """Without the change it ends in an IndexError: each takes the number of its place."""
    for source in (IMPORTS, LIGHTNING):
        assert ranks.on_ranks(source, timeout=180).status == "ok"
    ended = ranks.on_ranks(ONE_EACH, "--timeout 120", timeout=180)
    assert ended.status == "ok", ended.text
    assert ended.text.endswith("ranks 0–2 → (3, 4, True, True)\n"), ended.text


LAUNCH = """
from accelerate import Accelerator, notebook_launcher
def train(steps):
    accelerator = Accelerator(cpu=True)
    module = nn.Linear(4, 1)
    model, optimizer, loader = accelerator.prepare(
        module, torch.optim.SGD(module.parameters(), lr=0.1), DataLoader(data, steps))
    for x, y in loader:
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
    print(accelerator.num_processes, "processes, equal:", same(module))
"""


def test_notebook_launcher_runs_the_function_on_the_ranks_that_exist(ranks):
    assert ranks.on_ranks(IMPORTS + LAUNCH, timeout=180).status == "ok"
    here = ranks.on_ranks("notebook_launcher(train, (8,), num_processes=size)", timeout=180)
    assert here.status == "ok", here.text
    assert "notebook_launcher: train runs on the 3 ranks that exist\n" in here.text
    assert "3 processes, equal: True" in here.text
    more = ranks.on_ranks("notebook_launcher(train, (8,), num_processes=8)")
    assert "not on 8 new processes. For 8 ranks type: %distributed restart -n 8" in more.text
    assert "3 processes, equal: True" in more.text


PAGE = (Path(__file__).parents[2] / "docs" / "install.md").read_text()
(COLAB,) = re.findall(r"test_libraries.py -->\n```python\n(.*?)```", PAGE, re.S)


def test_the_training_of_the_page_on_installation_runs_where_there_is_no_gpu(ranks):
    assert ranks.on_ranks(END, timeout=180).status == "ok"
    ended = ranks.run(COLAB, 180)
    assert ended.status == "ok", ended.text
    losses = re.findall(r"loss (\d+\.\d+) of 3 ranks", ended.text)
    assert max(map(float, losses)) < 1  # it was about 9
