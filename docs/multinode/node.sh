#!/bin/bash
# One node of several, started by hand on each: NODES, HOST (the first node's address) and PORT are the same everywhere.
#   NODES=2 HOST=10.0.0.1 PORT=29400 RANKS_PER_NODE=4 ./node.sh --optim kfac --epochs 10
# The store behind HOST:PORT asks nobody for a password and listens on every interface of HOST: keep the port inside a
# private network.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# A new store for the ranks at each restart: in the one that agents share by default (torch 2.13), ranks that start again
# may find the addresses of those that died.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun \
    --nnodes "${NODES:?number of nodes}" \
    --nproc-per-node "${RANKS_PER_NODE:?ranks on each node, one per GPU}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "${HOST:?address of the first node}:${PORT:?a free port of it}" \
    --rdzv-id "${JOB:-secondorder}" \
    --max-restarts "${MAX_RESTARTS:-3}" \
    "$here/train.py" "$@"
