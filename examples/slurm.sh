#!/bin/bash
# Training under Slurm that continues after a requeue:  sbatch examples/slurm.sh
# On nodes with GPUs add --gpus-per-node=8: one task a node then starts one rank for each of them.
#SBATCH --job-name=shardwise
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out

# Starts itself in every task with srun, and finds the ranks, their number and where they meet in Slurm's variables.
# After a requeue (a node lost, preemption, `scontrol requeue`) the script starts again from the newest checkpoint.
"${PYTHON:-python}" -m shardwise run examples/elastic.py --dir "${CHECKPOINTS:-checkpoints}" "$@"
