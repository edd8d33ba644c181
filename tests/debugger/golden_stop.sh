#!/bin/sh
# golden_stop.sh PYTHON [--device cuda ...]: `run --debug` of a wrong case, and a console that asks for the golden.
# Passes when both ranks stop, the console names the wrong tensor, and the exit code is that of a mismatch.
python=$1
shift
export MPDB_JOB="golden-stop-$$"
said=$(mktemp)
trap 'rm -f "$said"' EXIT
"$python" -m multiprocessing_pdb "$MPDB_JOB" -c "wait 2 300" -c "diff --golden actual" -c "diff --golden" -c "@all c" >"$said" &
console=$!
"$python" -m moeverify run cases/ddp-ep2.yaml --debug \
    --fault moeverify.faults.catalogue.expert_gradients:a01_ddp_expert_scale "$@"
code=$?
wait "$console"
cat "$said"
if [ "$code" = 1 ] && grep -q "differs from the golden: relative error 1," "$said" && grep -q "ranks 0-1: runs on" "$said"; then
    echo PASS
else
    echo "FAIL, exit code $code"
    exit 1
fi
