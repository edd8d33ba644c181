#!/bin/bash
# Verify cases on two nodes of two ranks each, and watch: the first rank prints.
#
#     examples/slurm/interactive.sh cases/fsdp2-ep2.yaml
exec srun --nodes=2 --ntasks-per-node=2 --kill-on-bad-exit=0 --wait=60 \
    ${PYTHON:-python} -m moeverify run "$@" --device "${DEVICE:-auto}"
