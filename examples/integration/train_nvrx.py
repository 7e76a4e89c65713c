"""NVRx: the training function restarts in the living processes, from the last checkpoint.

torchrun --nproc-per-node 4 examples/integration/train_nvrx.py
"""

# integration: begin
import os
from datetime import timedelta
# integration: end

import common
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# integration: begin
from nvidia_resiliency_ext import inprocess
# integration: end


# integration: begin
# A client of torchrun's store, which no rank's end takes away.
class AgentStore(inprocess.store.StoreMixin, dist.TCPStore):
    def __init__(self):
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        super().__init__(*address, is_master=False, wait_for_workers=False)


# torch's `Store.barrier` would shadow NVRx's.
for store in (inprocess.store.TCPStore, inprocess.store.PrefixStore):
    store.barrier = inprocess.store.StoreMixin.barrier
os.environ.pop("LOCAL_RANK", None)  # where it is set, GPUs are checked at a restart, on CPU too


@inprocess.Wrapper(
    store_factory=AgentStore,
    initialize=inprocess.initialize.RetryController(max_iterations=2, min_world_size=4),
    monitor_process_interval=timedelta(seconds=0.05),
    last_call_wait=timedelta(seconds=0.05),
    heartbeat_interval=timedelta(seconds=0.2),
    heartbeat_timeout=timedelta(seconds=15),
    soft_timeout=timedelta(seconds=10),
    hard_timeout=timedelta(seconds=20),
    barrier_timeout=timedelta(seconds=30),
    completion_timeout=timedelta(seconds=30),
    termination_grace_time=timedelta(seconds=0.5),
)
def train(call_wrapper: inprocess.CallWrapper = None):
    prefix = f"iteration{call_wrapper.iteration}"
    store = dist.PrefixStore(prefix, AgentStore())
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    shard, _ = dist.new_subgroups_by_enumeration(common.SHARDS, timeout=common.TIMEOUT)
    # integration: end
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
