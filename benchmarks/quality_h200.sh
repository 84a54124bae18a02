#!/usr/bin/env bash
# The comparison of drafters on a host of two H200 (GPUS=0: of one), in steps of a few minutes that are gone on with:
#
#   . /dev/shm/eyas-host/env.sh                     (benchmarks/offline_host.sh made it)
#   MODEL=.../SmolLM2-135M-Instruct QUESTIONS=.../eval bash benchmarks/quality_h200.sh stores try drafters live fp8 ablations collect
#
#   stores    4.7 M tokens of the target's own answers, their states twice: `last` where ours reads it, and everywhere
#   try       five steps of each peer: layouts are written, and what cannot run here shows at once
#   grid      our learning rate: the others beside LR
#   drafters  three seeds of ours, three learning rates of each peer, each run alone on its GPU; acceptance simulated
#   live      SGLang with the best of each, and without: all questions, 1, 8 and 32 at a time
#   fp8       a third store, which one of the ablations reads
#   ablations nine runs, two on a GPU at a time
set -euo pipefail
cd "$(dirname "$0")"
W=${W:-/dev/shm/quality} LR=${LR:-3e-3} GPUS=${GPUS:-0 1}
SERVERS="--mem-fraction-static 0.85 --max-total-tokens 200000 --cuda-graph-backend-prefill disabled"
TRIED="specforge-1e-3-try speculators-1e-3-try"

quality() { python3 quality_gpu.py "$@" --work "$W" --target "$MODEL"; }
# shellcheck disable=SC2086  # words are meant to be split
step() {
  case $1 in
  stores) quality corpus --answers data/smollm2-answers.jsonl.xz --store loss all --gpus ${GPUS##* } \
    $SGLANG --flags "$FLAGS $SERVERS" --first-port 32100 ;;
  fp8) quality corpus --store fp8 --gpus ${GPUS##* } $SGLANG --flags "$FLAGS $SERVERS" --first-port 33100 ;;
  try) quality train $TRIED --max-steps 5 --gpus $GPUS && rm -r "$W"/{peers,heads}/*-try* ;;
  grid) quality train lr-3e-4 lr-1e-3 lr-3e-3 --gpus $GPUS ;;
  drafters)
    quality train {specforge,speculators}-{1e-3,3e-3,3e-4} "lr-$LR" seed-1 seed-2 --lr "$LR" --gpus $GPUS && # long ones first
      quality simulate --limit 60 --gpus $GPUS --at-once 5
    ;;
  live) quality live specforge "lr-$LR" speculators seed-1 seed-2 --max-new-tokens 128 --gpus $GPUS \
    --questions "$QUESTIONS"/{mt_bench,gsm8k,humaneval}/question.jsonl $SGLANG --flags "$FLAGS $SERVERS" --first-port 34100 ;;
  ablations) quality train classic drop vocab-8k vocab-49k fp8 last-all k3 k5 eagle-3.1 --lr "$LR" --at-once 2 --gpus $GPUS ;;
  collect) quality collect --out "${OUT:-$W}/acceptance.json" --runs "${OUT:-$W}/runs.json" ;;
  *) echo "no step $1" >&2 && return 2 ;;
  esac
}
for name in "$@"; do
  began=$SECONDS
  step "$name"
  echo "== $name took $((SECONDS - began)) s"
done
