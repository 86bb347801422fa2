#!/usr/bin/env bash
# Train on one node or many with torchrun, one process a GPU.
#
# one node:    bash launch/torchrun.sh CONFIG.yaml [section.key=value ...]
# many nodes:  on every node, with the same JOB_ID:
#              NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 JOB_ID=17 bash launch/torchrun.sh CONFIG.yaml ...
#
# NPROC_PER_NODE   processes on this node; default: its GPUs, or 1 without any
# JOB_ID           any number that the nodes of one job share and two jobs on a host do not; it also chooses the port
# MASTER_PORT      the port on MASTER_ADDR, where JOB_ID's choice does not suit
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 2; }

nproc_per_node=${NPROC_PER_NODE:-$( (nvidia-smi --list-gpus 2>/dev/null || true) | wc -l)}
[ "$nproc_per_node" -gt 0 ] || nproc_per_node=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

if [ "${NNODES:-1}" -eq 1 ]; then
    rendezvous=(--standalone)  # a free port, so that two jobs on one host never meet
else
    : "${NODE_RANK:?the number of this node, 0 to NNODES-1}" "${MASTER_ADDR:?the host name of node 0}" "${JOB_ID:?see usage}"
    rendezvous=(--nnodes "$NNODES" --node-rank "$NODE_RANK" --rdzv-id "$JOB_ID" --rdzv-backend c10d
                --rdzv-endpoint "$MASTER_ADDR:${MASTER_PORT:-$((20000 + JOB_ID % 20000))}")
fi
exec python -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node "$nproc_per_node" -m rlflow train "$@"
