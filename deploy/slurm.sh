#!/bin/bash
# Four nodes with four processes each, under Slurm: sbatch deploy/slurm.sh
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
set -euo pipefail

# A folder that all nodes see. The key is new for each job, and only its user may read it.
export SHOAL_KEY_FILE="$PWD/shoal.$SLURM_JOB_ID.key"
(umask 077 && openssl rand -hex 32 > "$SHOAL_KEY_FILE")
trap 'rm -f "$SHOAL_KEY_FILE"' EXIT

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# A port of the job's own: two jobs that meet at one port of one node end together.
port=$((20000 + SLURM_JOB_ID % 10000))
srun --kill-on-bad-exit=1 torchrun --nnodes="$SLURM_NNODES" --nproc-per-node=4 \
  --rdzv-backend=c10d --rdzv-endpoint="$first:$port" --rdzv-id="$SLURM_JOB_ID" train.py
