"""A training script for one node or several: put your model and data in place of the two functions below.

``torchrun`` starts one process per rank and sets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE. After a crash it
starts all of them again; the script then goes on from its last checkpoint.
"""

import argparse
import logging
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import secondorder


def make_model() -> nn.Module:
    """The model, with the same initial weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 2))


def make_data() -> Dataset:
    """The data, the same on every rank; the sampler gives each rank its part."""
    inputs = torch.randn(4096, 20, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, (inputs[:, :10].sum(1) > inputs[:, 10:].sum(1)).long())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optim", default="kfac", help="a name that secondorder.create takes")
    parser.add_argument("--comm", help="a strategy, such as mem_opt; unset: directions stay inside a node")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64, help="examples per rank and step")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"), help="on a disk that all nodes see")
    parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints")
    return parser.parse_args()


def save(path: Path, epoch: int, step: int, model: nn.Module, opt: secondorder.SecondOrderOptimizer) -> None:
    opt.consolidate_state_dict(to=0)  # every rank calls it: curvature that others own comes to rank 0
    if dist.get_rank() == 0:
        state = {"epoch": epoch, "step": step, "model": model.state_dict(), "opt": opt.state_dict()}
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)  # a crash while writing leaves the old one


def train(args: argparse.Namespace, device: torch.device) -> secondorder.SecondOrderOptimizer:
    model = make_model().to(device)
    # Rows of the grid are consecutive ranks: a fraction of one over the ranks of a node makes each node a row.
    comm = args.comm or secondorder.HybridOpt(1 / int(os.environ["LOCAL_WORLD_SIZE"]))
    opt = secondorder.create(args.optim, model, lr=0.05, comm=comm)
    start_epoch, start_step = 0, 0
    if args.checkpoint.exists():
        saved = torch.load(args.checkpoint, map_location=device, weights_only=True)
        start_epoch, start_step = saved["epoch"], saved["step"]
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["opt"])
    wrapped = DistributedDataParallel(model)

    data = make_data()
    sampler = DistributedSampler(data, seed=2)
    loader = DataLoader(data, args.batch_size, sampler=sampler)
    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):
            if epoch == start_epoch and step < start_step:
                continue  # these were seen before the restart
            opt.zero_grad()
            loss = cross_entropy(wrapped(x.to(device)), y.to(device))
            loss.backward()
            opt.step()
            if (step + 1) % args.save_every == 0:
                save(args.checkpoint, epoch, step + 1, model, opt)
        logging.info("rank %d epoch %d loss %.6f", dist.get_rank(), epoch, loss.item())
    save(args.checkpoint, args.epochs, 0, model, opt)
    return opt


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    # The timeout is how long a rank waits for one that died.
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(minutes=10))
    with train(arguments(), device) as opt:
        if dist.get_rank() == 0:
            logging.info("%s", opt.describe())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
