#!/usr/bin/env bash
# Run everything that needs a GPU, in two parts of at most ten minutes each:
#
#   bash benchmarks/gpu_proof.sh [--part 1|2] [--minutes M] [--workloads "NAME ..."] [--dry-run]
#
# Part 1 runs the tests that need a GPU, with generic and with specialised kernels. Then, if compute-sanitizer is installed, it runs a few of them under memcheck and
# racecheck.
# Part 2 measures the host time of a call. Then it tunes each workload in turn (the table is written to tuning/tables/)
# and runs `cunorm bench` for it (the result is written to benchmarks/results/). At the end it writes docs/speed.md from
# the results, for which it reserves some seconds.
#
# Without --part, both parts run. Each part has M minutes (9 by default). At the end, the script names the steps that had no
# time left and those that failed; if there are any, the exit code is 1. For the steps that are left, run the script
# again with --workloads: tuning resumes with the existing table, and a result of the same day is replaced.
# --dry-run runs every step on the CPU executor with one tiny shape, and deletes all results.
set -uo pipefail
cd "$(dirname "$0")/.."

parts="1 2" minutes=9 dry=""
# The most important workloads come first, because the time may not suffice for all.
workloads="quick llm sd15-unet resnet50-bn sdxl-unet resnet50-gn vision qk-norm convnext mobile-bn vae nnunet mlp odd segmentation-bn bn1d video-vae"
usage() {
  echo "usage: bash benchmarks/gpu_proof.sh [--part 1|2] [--minutes M] [--workloads \"NAME ...\"] [--dry-run]; $1" >&2
  exit 2
}
while [ $# -gt 0 ]; do
  case $1 in
    --part) [[ ${2:-} =~ ^[12]$ ]] || usage "--part: '${2:-}', expected 1 or 2"; parts=$2; shift ;;
    --minutes) [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || usage "--minutes: '${2:-}', expected a whole number"; minutes=$2; shift ;;
    --workloads) [ -n "${2:-}" ] || usage "--workloads: empty, expected names: \"llm vae\""; workloads=$2; shift ;;
    --dry-run) dry=yes ;;
    *) usage "unknown option: $1" ;;
  esac
  shift
done
page_seconds=20
dtype=bfloat16 results=benchmarks/results tables=tuning/tables
failed="" unreached=""
if [ -n "$dry" ]; then
  box=$(mktemp -d)
  trap 'rm -rf "$box"' EXIT
  results=$box/results tables=$box/tuning workloads=quick
  export CUNORM_CACHE_DIR="${CUNORM_CACHE_DIR:-$box/cache}"
else
  python -c "import sys; from cunorm.ops.registry import gpu_present; sys.exit(0 if gpu_present() else 3)" || {
    echo "gpu_proof: CuPy finds no GPU; run \`cunorm doctor\`, or use --dry-run" >&2
    exit 3
  }
fi

mkdir -p "$results" "$tables"

# step NAME COMMAND...: run a command within the time left of the part. After that time the command gets SIGINT, as from
# Ctrl-C. The tuner and the bench then store the results that they have.
step() {
  local name=$1 left=$((deadline - SECONDS)) code
  shift
  if [ "$left" -lt 5 ]; then
    unreached+=" $name;"
    return
  fi
  echo "== $name"
  timeout -s INT -k 30 "$left" env --default-signal=INT "$@"
  code=$?
  case $code in
    0) ;;
    124 | 130 | 137) unreached+=" $name (begun);" ;;
    *) failed+=" $name (exit code $code);" ;;
  esac
}

part_1() {
  step "doctor" cunorm doctor
  if [ -n "$dry" ]; then
    step "tests" python -m pytest -q -p no:cacheprovider tests/tuning/test_tuning_clock.py
  else
    step "tests" python -m pytest -q -n 4 --gpu -m gpu
    step "tests of the specialised kernels" env CUNORM_SPECIALISE=always python -m pytest -q -n 4 --gpu -m gpu
  fi
  if [ -n "$dry" ] || ! command -v compute-sanitizer >/dev/null; then
    echo "== compute-sanitizer does not run here: no memcheck, no racecheck"
    return
  fi
  for tool in memcheck racecheck; do
    step "$tool" compute-sanitizer --tool "$tool" --error-exitcode 9 \
      python -m pytest -q --gpu tests/executors/test_gpu_executor.py -k "oracle or strides"
  done
}

part_2() {
  local device workload date
  device=$(python -c "
from cunorm.executors import choose
from cunorm.tiling import table
print(table.slug(choose.executor('${dry:+cpu}' or 'gpu').limits()))")
  local table="$tables/$device.json" until=$deadline
  date=$(date -u +%F)
  if [ -n "$dry" ]; then
    step "host cost" python benchmarks/host_overhead_gpu.py --rehearse
  else
    step "host cost" python benchmarks/host_overhead_gpu.py --json "$results/host_overhead_gpu-$device-$date.json"
  fi
  deadline=$((until - page_seconds))
  for workload in $workloads; do
    if [ -n "$dry" ]; then
      step "tune" cunorm tune layer_norm --shape 64,256 --dtype $dtype --evaluator model --table "$table"
      CUNORM_TILING_TABLE=$table step "bench" cunorm bench layer_norm --shape 64,256 --dtype $dtype --rehearse --rounds 2 --peers torch,liger \
        --quiet --json "$results/bench-$device-tiny-$date.json"
      continue
    fi
    step "tune $workload" cunorm tune --workload "$workload" --dtype $dtype --seconds 2 --table "$table" --resume
    CUNORM_TILING_TABLE=$table step "bench $workload" cunorm bench --workload "$workload" --dtype $dtype \
      --peers torch,liger,quack,apex --json "$results/bench-$device-$workload-$date.json"
  done
  deadline=$until
  if [ -n "$dry" ]; then
    step "speed" python benchmarks/speed_page.py --check
  else
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
