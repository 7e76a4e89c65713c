"""What the scripts beside this one share: a model, its data, checkpoints, and a rank that is late.

`train_plain.py` is a training script as engineers write it; each other script is the same with one
contender integrated. All lines that differ stand between `# integration: begin` and `end`.

EXAMPLE_FOLDER  where checkpoints go (default `checkpoints`)
EXAMPLE_FAIL_AT an update: the last rank comes to the collective after it later than its peers wait
"""

import hashlib
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

UPDATES, CHECKPOINT_EVERY = 6, 2
REPLICAS, SHARDS = [[0, 2], [1, 3]], [[0, 1], [2, 3]]
TIMEOUT = timedelta(seconds=3)
"""Of a collective between replicas."""
FOLDER = Path(os.environ.get("EXAMPLE_FOLDER", "checkpoints"))
_FAIL_AT = int(os.environ.get("EXAMPLE_FAIL_AT", "0"))
_DIM, _LAYERS = 16, 3


class Block(nn.Module):
    """A residual feed-forward block."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(_DIM, 4 * _DIM)
        self.down = nn.Linear(4 * _DIM, _DIM)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def build_model(mesh):
    """Shard every block, then the rest."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(_LAYERS)], nn.Linear(_DIM, 1))
    for block in model[:-1]:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def loss_of(model, step):
    """Compute the loss of this rank's batch of update `step`."""
    generator = torch.Generator().manual_seed(1000 * step + int(os.environ["RANK"]))
    x = torch.randn(8, _DIM, generator=generator)
    return (model(x) - x.sum(dim=1, keepdim=True)).square().mean()


def save(model, optimizer, step):
    """Write a checkpoint; `.metadata` comes last and makes it complete."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": step}
    dcp.save(state, checkpoint_id=FOLDER / f"step{step}")


def restore(model, optimizer):
    """Load the newest complete checkpoint, if any; return its update."""
    found = sorted(int(path.parent.name[4:]) for path in FOLDER.glob("step*/.metadata"))
    if not found:
        return 0
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": 0}
    dcp.load(state, checkpoint_id=FOLDER / f"step{found[-1]}")
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return state["step"]


def come_late(step):
    """Have the last rank stay away for longer than its peers wait, once in a job's life."""
    done = FOLDER / "was-late"
    if step == _FAIL_AT and int(os.environ["RANK"]) == 3 and not done.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        done.touch()
        print(f"rank 3 comes late after update {step}", flush=True)
        time.sleep(TIMEOUT.total_seconds() + 1)


def log_loss(step, mean):
    """Print what the collective gave, which failed or did not."""
    if int(os.environ["RANK"]) == 0:
        print(f"update {step} loss {mean.item() / len(REPLICAS[0]):.6f}", flush=True)


def finish(model, optimizer):
    """Print the digest of this rank's weights and moments, and leave."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        moments = optimizer.state[parameter]
        for value in (parameter, moments["exp_avg"], moments["exp_avg_sq"]):
            digest.update(value.to_local().detach().numpy().tobytes())
    print(f"rank {dist.get_rank()} weights {digest.hexdigest()[:16]}", flush=True)
    dist.destroy_process_group()
