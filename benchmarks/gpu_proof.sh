#!/usr/bin/env bash
# Run everything that needs a GPU, in two parts of at most ten minutes each:
#
#   bash benchmarks/gpu_proof.sh [--part 1|2] [--minutes M] [--workloads "NAME ..."] [--results DIR] [--kernels DIR] [--dry-run]
#   bash benchmarks/gpu_proof.sh --prepare DIR --device NAME [--workloads "NAME ..."]
#
# Part 1 asks whether the kernels are right. It runs the tests that need a GPU, among them the battery of hostile
# problems with generic and with specialised kernels. At the same time compute-sanitizer, if there is one, runs a case of
# every kernel under memcheck, racecheck and synccheck, and the bench's peers compile for part 2.
# Part 2 asks how fast they are. It measures the host time of a call, and tiles: of the entries of the GPU's table whose
# kernels have changed since; without a table, the cost model's best of all workloads. All cores compile these first.
# Then, for each workload in turn, it tunes (the table is written to tuning/tables/) and runs `cunorm bench` (the result
# is written to benchmarks/results/). At the end, for which it reserves some seconds, Nsight Compute, if there is one,
# profiles the measured problems that are furthest from the copy, and docs/speed/measured*.md are written.
#
# Without --part, both parts run. Each part has M minutes (9 by default). At the end, the script names the steps that had
# no time left and those that failed; if there are any, the exit code is 1. For the steps that are left, run the script
# again with --workloads: tuning resumes with the existing table, and a result of the same day is replaced.
# --results writes everything to DIR instead of the checkout, the logs of the steps included, each when its step ends.
# --dry-run runs every step on the CPU executor with one tiny shape, and deletes all results.
# cunorm need not be installed; the folder of the checkout in PYTHONPATH suffices.
#
# --prepare runs on a machine without a GPU: it compiles the kernels of both parts for a GPU such as H200, and writes them
# to DIR. That takes an hour on two cores; run again, it continues. With --kernels DIR, the machine with the GPU takes
# them from there, and compiles what is missing. It needs the same version of NVRTC; prepare_proof.py says more.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

parts="1 2" minutes=9 dry="" into="" kernels="" prepare="" device=""
# The most important workloads come first, because the time may not suffice for all.
workloads="quick llm llm-rms sd15-unet resnet50-bn sdxl-unet resnet50-gn vision qk-norm convnext mobile-bn vae nnunet nnunet-in mlp odd segmentation-bn bn1d video-vae"
usage() {
  echo "usage: bash benchmarks/gpu_proof.sh [--part 1|2] [--minutes M] [--workloads \"NAME ...\"] [--results DIR] [--kernels DIR] [--dry-run] | --prepare DIR --device NAME; $1" >&2
  exit 2
}
while [ $# -gt 0 ]; do
  case $1 in
    --part) [[ ${2:-} =~ ^[12]$ ]] || usage "--part: '${2:-}', expected 1 or 2"; parts=$2; shift ;;
    --minutes) [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || usage "--minutes: '${2:-}', expected a whole number"; minutes=$2; shift ;;
    --workloads) [ -n "${2:-}" ] || usage "--workloads: empty, expected names: \"llm vae\""; workloads=$2; shift ;;
    --results) [ -n "${2:-}" ] || usage "--results: empty, expected a folder"; into=$2; shift ;;
    --kernels) [ -d "${2:-}" ] || usage "--kernels: '${2:-}' is no folder; write it with --prepare"; kernels=$2; shift ;;
    --prepare) [ -n "${2:-}" ] || usage "--prepare: empty, expected a folder"; prepare=$2; shift ;;
    --device) [ -n "${2:-}" ] || usage "--device: empty, expected a GPU, such as H200"; device=$2; shift ;;
    --dry-run) dry=yes ;;
    *) usage "unknown option: $1" ;;
  esac
  shift
done
page_seconds=20 profile_seconds=60
if [ -n "$prepare" ]; then
  [ -n "$device" ] || usage "--prepare: without --device, expected a GPU, such as H200"
  mkdir -p "$prepare"
  python benchmarks/measure_tiles.py draw --device "$device" --workloads "${workloads// /,}" --out "$prepare/tiles.jsonl" &&
    python benchmarks/prepare_proof.py pack "$prepare/tiles.jsonl" --device "$device" --out "$prepare"
  exit
fi
dtype=bfloat16 results=benchmarks/results tables=tuning/tables logs=""
failed="" unreached=""
if [ -n "$dry" ]; then
  box=$(mktemp -d)
  trap 'rm -rf "$box"' EXIT
  into=$box workloads=quick
  export CUNORM_CACHE_DIR="${CUNORM_CACHE_DIR:-$box/cache}"
else
  python -c "import sys; from cunorm.ops.registry import gpu_present; sys.exit(0 if gpu_present() else 3)" || {
    echo "gpu_proof: CuPy finds no GPU; run \`cunorm doctor\`, or use --dry-run" >&2
    exit 3
  }
fi
if [ -n "$into" ]; then
  results=$into/results tables=$into/tables logs=$into/logs
else
  logs=$(mktemp -d)
fi
mkdir -p "$results" "$tables" "$logs"

# limited COMMAND...: run a command within the time left of the part. After that time the command gets SIGINT, as from
# Ctrl-C. The tuner and the bench then store the results that they have.
limited() {
  timeout -s INT -k 30 "$((deadline - SECONDS))" env --default-signal=INT "$@"
}

# ended NAME CODE: record how a step ended.
ended() {
  case $2 in
    0) ;;
    124 | 130 | 137) unreached+=" $1 (begun);" ;;
    *) failed+=" $1 (exit code $2);" ;;
  esac
}

# step NAME COMMAND...: run a command; its output is shown and kept.
step() {
  local name=$1
  shift
  if [ $((deadline - SECONDS)) -lt 5 ]; then
    unreached+=" $name;"
    return
  fi
  echo "== $name"
  limited "$@" 2>&1 | tee "$logs/${name// /-}.log"
  ended "$name" "${PIPESTATUS[0]}"
}

# Steps that run at the same time: their output is kept, and its end is shown when all have ended.
names=() pids=()
beside() {
  local name=$1
  shift
  limited "$@" >"$logs/${name// /-}.log" 2>&1 &
  names+=("$name") pids+=($!)
}
collect() {
  local at
  for at in "${!pids[@]}"; do
    wait "${pids[$at]}"
    ended "${names[$at]}" $?
    echo "== ${names[$at]}"
    tail -n 25 "$logs/${names[$at]// /-}.log"
  done
  names=() pids=()
}

# unpack NAME: add prepared kernels to the cache folder.
unpack() {
  [ -z "$kernels" ] || step "unpack $1" python benchmarks/prepare_proof.py unpack "$kernels/$1.tar.xz"
}

# Compile the peers of part 2: their kernels stay on the disk. Nothing is recorded: what is missing is compiled later.
warm_up() {
  local workload
  for workload in $workloads; do
    [ $((deadline - SECONDS)) -ge 5 ] || break
    CUNORM_SPECIALISE=never limited python -m cunorm bench --workload "$workload" --dtype $dtype --rounds 2 \
      --peers torch.compile,liger --quiet
  done >"$logs/peers.log" 2>&1
}

part_1() {
  step "doctor" python -m cunorm doctor
  unpack tests
  if [ -n "$dry" ]; then
    step "tests" python -m pytest -q -p no:cacheprovider tests/tuning/test_tuning_clock.py
    step "cases" python -m tests.battery.one_per_kernel --list
    echo "== compute-sanitizer does not run here: no memcheck, no racecheck, no synccheck"
    return
  fi
  local tool workers=$(($(nproc) > 8 ? $(nproc) - 6 : 2)) patience=""
  # A kernel that hangs must not take the whole part.
  python -c "import pytest_timeout" 2>/dev/null && patience="--timeout=120 --timeout-method=thread"
  if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck synccheck; do
      # Two processes per tool share the cases.
      beside "$tool 1" compute-sanitizer --tool "$tool" --error-exitcode 9 python -m tests.battery.one_per_kernel --only "^group_"
      beside "$tool 2" compute-sanitizer --tool "$tool" --error-exitcode 9 python -m tests.battery.one_per_kernel --only "^(?!group_)"
    done
  else
    echo "== compute-sanitizer is not installed: no memcheck, no racecheck, no synccheck"
  fi
  # The plugin pytest-benchmark warns beside xdist, and a warning is an error here.
  # shellcheck disable=SC2086
  beside "tests" python -m pytest -q -n "$workers" --tb=short -p no:cacheprovider -p no:benchmark --gpu -m gpu $patience \
    tests/battery tests/executors tests/kernels tests/ops tests/ascend tests/runtime tests/gate tests/tuning tests/cli \
    tests/torch/test_gpu.py tests/test_train_digits.py
  warm_up &
  local warming=$!
  collect
  wait $warming
}

part_2() {
  local workload date
  device=$(python -c "
from cunorm.executors import choose
from cunorm.tiling import table
print(table.slug(choose.executor('${dry:+cpu}' or 'gpu').limits()))")
  local table="$tables/$device.json" until=$deadline
  date=$(date -u +%F)
  unpack tiles
  if [ -n "$dry" ]; then
    step "host cost" python benchmarks/host_overhead_gpu.py --rehearse
    step "draw" python benchmarks/measure_tiles.py draw --workloads mlp --problems 1 --out "$results/tiles.jsonl"
    step "compile" python benchmarks/measure_tiles.py build "$results/tiles.jsonl" --seconds 0
  else
    step "host cost" python benchmarks/host_overhead_gpu.py --json "$results/host_overhead_gpu-$device-$date.json"
    local drawn=(--workloads "${workloads// /,}")
    [ -f "tuning/tables/$device.json" ] && drawn=(--stale "tuning/tables/$device.json")
    step "draw" python benchmarks/measure_tiles.py draw "${drawn[@]}" --out "$logs/tiles.jsonl"
    step "compile" python benchmarks/measure_tiles.py build "$logs/tiles.jsonl" --seconds 100
    step "measure tiles" python benchmarks/measure_tiles.py run "$logs/tiles.jsonl" --seconds 120 --out "$results/measured_tiles-$device-$date.jsonl"
    step "table" python benchmarks/measure_tiles.py table "$results/measured_tiles-$device"-*.jsonl --table "$table"
  fi
  deadline=$((until - page_seconds - profile_seconds))
  for workload in $workloads; do
    if [ -n "$dry" ]; then
      step "tune" python -m cunorm tune layer_norm --shape 64,256 --dtype $dtype --evaluator model --table "$table"
      CUNORM_TILING_TABLE=$table step "bench" python -m cunorm bench layer_norm --shape 64,256 --dtype $dtype --rehearse \
        --rounds 2 --peers torch,liger --quiet --json "$results/bench-$device-tiny-$date.json"
      continue
    fi
    step "tune $workload" python -m cunorm tune --workload "$workload" --dtype $dtype --seconds 2 --table "$table" --resume
    CUNORM_TILING_TABLE=$table step "bench $workload" python -m cunorm bench --workload "$workload" --dtype $dtype \
      --peers torch,torch.compile,liger,quack,flashinfer,apex --json "$results/bench-$device-$workload-$date.json"
  done
  deadline=$((until - page_seconds))
  if [ -n "$dry" ]; then
    echo "== Nsight Compute does not run here: no profiles"
  elif command -v ncu >/dev/null; then
    step "furthest" python benchmarks/profile_tiles.py draw "$results/measured_tiles-$device-$date.jsonl" --out "$logs/furthest.jsonl"
    step "profile" python benchmarks/profile_tiles.py ncu "$logs/furthest.jsonl" --csv "$logs/furthest.csv"
    step "keep" python benchmarks/profile_tiles.py keep "$logs/furthest.jsonl" "$logs/furthest.csv" --json "$results/profile-$device-$date.json"
  fi
  deadline=$until
  if [ -n "$dry" ]; then
    step "speed" python benchmarks/speed_page.py --check
  elif [ -z "$into" ]; then
    step "speed" python benchmarks/speed_page.py
  fi
}

for part in $parts; do
  deadline=$((SECONDS + 60 * minutes))
  echo "=== part $part, at most $minutes minutes"
  "part_$part"
done
[ -z "$dry" ] || echo "dry run: all results deleted, nothing measured"
[ -z "$unreached" ] || echo "not reached:$unreached" >&2
[ -z "$failed" ] || echo "failed:$failed" >&2
[ -z "$unreached$failed" ]
