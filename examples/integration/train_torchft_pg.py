"""torchft's process group between the replicas, configured anew after a failure.

torchrun --nproc-per-node 4 examples/integration/train_torchft_pg.py
"""

# integration: begin
import itertools
import os
# integration: end

import common
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# integration: begin
from torchft.process_group import ProcessGroupGloo
# integration: end


# integration: begin
# Connect the replicas, each time under a prefix that was never used.
def configure(group, generation):
    replica, shard = divmod(dist.get_rank(), 2)
    agent = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    prefix = f"{agent}/torchft/{generation}/{shard}"
    group.configure(prefix, replica_id=f"replica{replica}", rank=replica, world_size=2)


# integration: end
def train():
    dist.init_process_group("gloo")
    shard, _ = dist.new_subgroups_by_enumeration(common.SHARDS)
    # integration: begin
    replicate = ProcessGroupGloo(timeout=common.TIMEOUT)
    generations = itertools.count()
    configure(replicate, next(generations))
    replicate.register("replicate")
    # integration: end
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
        # integration: begin
        try:
            dist.all_reduce(mean, group=replicate)
        except RuntimeError:
            configure(replicate, next(generations))
            mean = loss.detach().clone()
            dist.all_reduce(mean, group=replicate)
        # integration: end
        common.log_loss(step, mean)
    common.finish(model, optimizer)


if __name__ == "__main__":
    train()
