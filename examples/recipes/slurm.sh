#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=USR1@120
# From a job of SLURM to weights that anybody loads.
#
#   sbatch examples/recipes/slurm.sh [options of slurm.py]
#   sbatch --nodes=1 --ntasks-per-node=2 --gpus-per-node=0 examples/recipes/slurm.sh --accelerator cpu
#
# USR1 comes two minutes before the time is up: the ranks save, and the job is requeued and goes on.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
folder=build/recipes/slurm
export LIGHTNING_SHARD_JOB_TOKEN=${LIGHTNING_SHARD_JOB_TOKEN:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' ')}

srun python -m examples.recipes.slurm train --folder "$folder" \
    --devices "$SLURM_NTASKS_PER_NODE" --num-nodes "$SLURM_NNODES" "$@"
rm -rf "$folder/model"
lightning-shard consolidate "$folder/last.ckpt" "$folder/model" --prefix network.
cp "$folder/config.json" "$folder/model"
python -m examples.recipes.slurm load --folder "$folder"
