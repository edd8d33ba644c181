#!/bin/bash
# Verify cases on two nodes of two ranks each, and go on where the job was when Slurm starts it again:
#
#     sbatch examples/slurm/batch.sh cases/fsdp2-ep2.yaml cases/hsdp.yaml
#
# Set before, where the defaults do not fit: KEEP, the file of finished verdicts (written by the first rank alone, on a
# disk that the first node of every start sees), and MOEVERIFY_CACHE, full goldens (a disk of each node, or a shared
# one: ranks make what their own lacks). A node of GPUs wants --gpus-per-task=1 and no --device.
#SBATCH --job-name=moeverify
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --requeue
#SBATCH --open-mode=append
set -u
keep=${KEEP:-moeverify-${SLURM_JOB_NAME}.jsonl}
cache=${MOEVERIFY_CACHE:-${TMPDIR:-/tmp}/moeverify-goldens}

# Without --kill-on-bad-exit the ranks that are left report what they wait for; with it they would be killed first.
srun --kill-on-bad-exit=0 --wait=60 \
    ${PYTHON:-python} -m moeverify run "$@" --device "${DEVICE:-auto}" --keep "$keep" --cache "$cache"
status=$?
# 3: a rank was lost; above: Slurm has killed some. What was finished is in $keep: a new start does no work twice.
if [ "$status" -ge 3 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 3 ]; then
    echo "moeverify: a rank was lost; job $SLURM_JOB_ID goes on in a new start"
    scontrol requeue "$SLURM_JOB_ID"
    sleep 60 # the requeue ends this script
fi
exit "$status"
