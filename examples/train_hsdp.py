"""Train a small model with fully_shard on a 2-D mesh (HSDP); one line attaches AccelPact.

torchrun --nproc-per-node 4 examples/train_hsdp.py --steps 20
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import accelpact


class Block(nn.Module):
    """A residual feed-forward block."""

    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


def build_model(mesh, dim=32, layers=4):
    """Shard every block, then the rest."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(dim) for _ in range(layers)], nn.Linear(dim, 1))
    for block in model[:-1]:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--shards", type=int, default=2)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    replicas = dist.get_world_size() // args.shards
    mesh = init_device_mesh("cpu", (replicas, args.shards), mesh_dim_names=("replicate", "shard"))
    replicate = mesh.get_group("replicate")
    model = build_model(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    accelpact.attach(model, optimizer)

    torch.manual_seed(100 + dist.get_rank())
    for step in range(args.steps):
        x = torch.randn(16, 32)
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        mean = loss.detach()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=replicate)
        if dist.get_rank() == 0:
            print(f"step {step} loss {mean.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
