"""Our allreduce as the communication hook of DistributedDataParallel: guarded, and timed."""

from __future__ import annotations

import subprocess

import pytest

from tests.torch.test_groups import IMPORTS

HOOK = f"""{IMPORTS}
def average(state, bucket):
    done = torch.futures.Future()
    done.set_result(allreduce(bucket.buffer(), name="gradients"))
    return done

def trained(hook):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    if hook:
        model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        model(torch.full((2, 4), rank + step + 1.0)).square().mean().backward()
        optimizer.step()
    return model.module.weight.detach()

dist.is_initialized() or dist.init_process_group()
"""
SAME = "bool(torch.allclose(trained(None), trained(average)))"


@pytest.fixture(autouse=True)
def _hooked(ranks):
    assert ranks.on_ranks(HOOK).status == "ok"


def test_gradients_are_averaged_by_our_allreduce_and_timed_in_the_panel(ranks):
    assert "ranks 0–2 → True" in ranks.on_ranks(SAME).text
    shown = ranks.on_ranks(SAME, "--view full")
    assert "gradients" in str(shown.displays)


def test_a_rank_that_leaves_out_a_backward_is_told_of_as_in_any_allreduce(ranks):
    cell = ranks.on_ranks(
        "model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))\n"
        "model.register_comm_hook(None, average)\n"
        "if rank != 1:\n    model(torch.ones(1, 4)).sum().backward()"
    )
    assert "raised RankLeft" in cell.text
    assert "without calling allreduce(Average); ranks 0, 2 wait for it" in cell.text
    assert ranks.on_ranks(SAME).text == "ranks 0–2 → True\n"


@pytest.mark.parametrize(("module", "values"), [("torch", 2), ("seeds_torch", 1)])
def test_forked_ranks_draw_different_numbers_unless_a_preloaded_module_has_seeded_torch(
    python, tmp_path, module, values
):
    (tmp_path / "seeds_torch.py").write_text(
        "import torch\ntorch.manual_seed(torch.initial_seed() + 1)"
    )
    program = (
        "import os, sys\nfrom types import SimpleNamespace\n"
        "from allranks.engine import libraries\n"
        "from allranks.features.torch_jax import host\n"
        "config = SimpleNamespace(devices=(libraries.HIDDEN,), environment={})\n"
        f"config.preload = ({module!r},)\n"
        "host.prepare()\n"
        "libraries.preload(config, lambda *_, **__: None)\n"
        "for _ in range(2):\n"
        "    if not (pid := os.fork()):\n"
        "        import torch\n"
        "        host.prepare_forked()\n"
        "        print(torch.rand(1).item(), flush=True)\n"
        "        os._exit(0)\n"
        "    os.waitpid(pid, 0)\n"
    )
    done = subprocess.run(
        [python, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert len(done.stdout.split()) == 2
    assert len({*done.stdout.split()}) == values
