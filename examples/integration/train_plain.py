"""Hybrid sharding on two replicas of two shards, with checkpoints; a failure ends the job.

torchrun --nproc-per-node 4 examples/integration/train_plain.py
"""

import common
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def train():
    dist.init_process_group("gloo")
    shard, _ = dist.new_subgroups_by_enumeration(common.SHARDS)
    replicate, _ = dist.new_subgroups_by_enumeration(common.REPLICAS, timeout=common.TIMEOUT)
    mesh = DeviceMesh.from_group(
        [replicate, shard], "cpu", mesh=common.SHARDS, mesh_dim_names=("replicate", "shard")
    )
    model = common.build_model(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = common.restore(model, optimizer)

    while step < common.UPDATES:
        loss = common.loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % common.CHECKPOINT_EVERY == 0:
            common.save(model, optimizer, step)

        common.come_late(step)
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=replicate)
        common.log_loss(step, mean)
    common.finish(model, optimizer)


if __name__ == "__main__":
    train()
