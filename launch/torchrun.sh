#!/usr/bin/env bash
# Train on one node or many with torchrun, one process a GPU.
#
# one node:    bash launch/torchrun.sh CONFIG.yaml [section.key=value ...]
# many nodes:  on every node, with the same JOB_ID, or the same MASTER_PORT:
#              NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 JOB_ID=17 bash launch/torchrun.sh CONFIG.yaml ...
#
# NPROC_PER_NODE   processes on this node; default: its GPUs, or 1 without any
# JOB_ID           any number that the nodes of one job share and two jobs on a host do not; it also chooses the port
# MASTER_PORT      the port on MASTER_ADDR, where JOB_ID's choice does not suit
#
# python is the one on PATH: activate the environment first. Exit codes: 0, 1 for a failure, 2 for what the user can mend.
set -euo pipefail
usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
fail() { echo "error: $*" >&2; exit 2; }

[ $# -ge 1 ] || usage
command -v python >/dev/null || fail "python is not on PATH: activate the environment first"

nnodes=${NNODES:-1}
nproc_per_node=${NPROC_PER_NODE:-$( (nvidia-smi --list-gpus 2>/dev/null || true) | wc -l)}
[[ $nnodes =~ ^[1-9][0-9]*$ ]] || fail "NNODES must be a number of nodes, not $nnodes"
[[ $nproc_per_node =~ ^[0-9]+$ ]] || fail "NPROC_PER_NODE must be a number of processes, not $nproc_per_node"
[ "$nproc_per_node" -gt 0 ] || nproc_per_node=1

if [ "$nnodes" -eq 1 ]; then  # on a free port, so that two jobs on one host never meet
    exec python -m rlflow train --nproc "$nproc_per_node" "$@"
fi

for name in NODE_RANK MASTER_ADDR; do
    [ -n "${!name:-}" ] || fail "$name is not set: $nnodes nodes need it"
done
[[ $NODE_RANK =~ ^[0-9]+$ && $NODE_RANK -lt $nnodes ]] || fail "NODE_RANK must be 0 to $((nnodes - 1)), not $NODE_RANK"
# Below the ports that Linux gives to outgoing connections, and the same wherever it is computed.
port=${MASTER_PORT:-}
if [ -z "$port" ]; then
    [[ ${JOB_ID:-} =~ ^[0-9]+$ ]] || fail "JOB_ID must be a number, the same on all nodes; or set MASTER_PORT"
    port=$((20000 + 10#$JOB_ID % 12000))
fi
if [ "$NODE_RANK" -eq 0 ] && (exec 3<>"/dev/tcp/$MASTER_ADDR/$port") 2>/dev/null; then
    fail "port $port of $MASTER_ADDR is taken: give the job another JOB_ID or MASTER_PORT"
fi

# The user's errors end here with their exit code, which torchrun would turn into 1.
python -m rlflow check --world-size $((nnodes * nproc_per_node)) --ranks-per-node "$nproc_per_node" "$@" >/dev/null
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# The static rendezvous numbers the ranks by NODE_RANK; the others number them by arrival or by host name.
exec python -m torch.distributed.run --nnodes "$nnodes" --node-rank "$NODE_RANK" --nproc-per-node "$nproc_per_node" \
    --master-addr "$MASTER_ADDR" --master-port "$port" -m rlflow train "$@"
