#!/usr/bin/env bash
# What needs eight GPUs, most wanted first. Each part has a limit of its own, so that a cut loses only the rest.
#
#     bash benchmarks/eight_gpus.sh [FOLDER]        # logs and JSON; by default build/gpu
#     REHEARSE=1 bash benchmarks/eight_gpus.sh DIR  # on a CPU: few cases, tiny sizes, the same commands
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out="$(realpath -m "${1:-build/gpu}")"
mkdir -p "$out"
export OMP_NUM_THREADS=1 PYTHONPATH="$PWD" PYTHONUNBUFFERED=1
python="${PYTHON:-python3}"
moeverify="$python -m moeverify"
ranks=8 cases="cases/*.yaml" tables="examples/torchtitan/*.yaml" faults="A04 A05 A07 A08 A13 A14 A16 B06 B08 E03"
faults="$faults G06 H02 H05 I03 L03 M02 M03 M04" # those that need 4 ranks or more
pairs="fsdp-tp-ep or (fsdp and pp)"
device="" depth="--layers 32" rows="--rows 1"
if [ -n "${REHEARSE:-}" ]; then
    ranks=2 cases="cases/ep2.yaml cases/fsdp2-ep2.yaml" tables="examples/torchtitan/fsdp-adam.yaml" faults="A04 L03"
    pairs="fsdp1 and not (tied or uneven)" device="--device cpu" depth="--rehearse" rows=""
fi

# part NAME SECONDS COMMAND...: run it, and say how it ended; its output is NAME-8.txt.
part() {
    name="$1" limit="$2"
    shift 2
    start=$(date +%s)
    # SIGINT, so that what is finished is written.
    timeout -s INT -k 20 "$limit" "$@" >"$out/$name-$ranks.txt" 2>&1
    echo "$name: exit code $?, $(($(date +%s) - start)) s of $limit"
}

part float64 240 $moeverify run $cases $device --json "$out/float64-$ranks.json"
part bfloat16 240 $moeverify run $cases $device --set recipe.precision=bfloat16 --json "$out/bfloat16-$ranks.json"
part torchtitan 400 $moeverify run $tables $device --json "$out/torchtitan-$ranks.json"
# The field: 0.033 to 0.117 steps a second and 54163 to 46692 MiB, at full depth with 16 micro-batches of one row.
part small-batches 240 $python benchmarks/small_batches.py --ranks $ranks $depth --steps 2 --warmup 1 \
    --variants fsdp "ep" "ep, and padded" "ep, and compiled" --json "$out/small-batches-$ranks.json"
part mixtral 240 $python benchmarks/mixtral_experts.py --ranks $ranks $depth $rows --steps 3 --json "$out"
part faults 240 $moeverify faults run $faults $device --markdown "$out/faults-$ranks.md"
part reshard 240 $moeverify reshard examples/reshard/*.yaml $device -k "$pairs" --json "$out/reshard-$ranks.json"
