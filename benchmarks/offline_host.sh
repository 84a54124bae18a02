#!/usr/bin/env bash
# Makes a GPU host without a registry ready for the benchmarks: unpacks SGLang and what else was carried there.
#
#   offline_host.sh sglang.tar.xz WHEELS      then, in every shell:  . /dev/shm/eyas-host/env.sh
#
# sglang.tar.xz: a tar of SGLang 0.5.17's site-packages for that host. WHEELS: a folder of pure Python wheels: stamina,
# tenacity, gguf, and for the peers specforge, speculators, hs_connectors, pydantic_settings, python_dotenv, loguru.
# The rest (PyTorch, transformers, pyarrow, rich, typer, httpx, ...) is the host's own.
set -euo pipefail
BUNDLE=$1 WHEELS=$2
ROOT=$(cd "$(dirname "$0")/.." && pwd)
HOST=${HOST:-/dev/shm/eyas-host}
mkdir -p "$HOST"/{sglang,wheels,shared}
tar xJf "$BUNDLE" -C "$HOST/sglang"
cp -r "$ROOT/src" "$ROOT/benchmarks" "$HOST/" # the checkout may be gone in the next shell
for wheel in "$WHEELS"/*.whl; do python3 -m zipfile -e "$wheel" "$HOST/wheels"; done

# The plugin's entry point, which SGLang finds by the metadata of an installed package.
INFO=$HOST/wheels/eyas-0.1.0.dist-info
mkdir -p "$INFO"
printf 'Metadata-Version: 2.1\nName: eyas\nVersion: 0.1.0\n' >"$INFO/METADATA"
printf '[sglang.srt.plugins]\neyas = eyas.capture.sglang_plugin:register\n' >"$INFO/entry_points.txt"

# Our side takes a few packages of the bundle, and not its transformers.
for name in pydantic pydantic_core annotated_types typing_inspection openai jiter sniffio distro gguf xxhash; do
  for path in "$HOST/sglang/$name" "$HOST/sglang/$name.py" "$HOST/sglang/$name"-*.dist-info; do
    [ ! -e "$path" ] || ln -sfn "$path" "$HOST/shared/"
  done
done

# SGLang 0.5.17 imports deep_gemm, which it does not use here, when it captures the graphs of an EAGLE-3 drafter.
[ -e "$HOST/sglang/deep_gemm" ] || : >"$HOST/wheels/deep_gemm.py"

cat >"$HOST/env.sh" <<END
export SGLANG_IS_FLASHINFER_AVAILABLE=false SGLANG_ENABLE_JIT_DEEPGEMM=0 HF_HUB_OFFLINE=1
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
export PYTHONPATH=$HOST/src:$HOST/wheels:$HOST/shared
# For the options of the benchmarks that start servers: \$SGLANG --flags "\$FLAGS ..."
export SGLANG="--sglang 0.5.17 --pythonpath $HOST/sglang:$HOST/wheels:$HOST/src"
export FLAGS="--attention-backend triton --sampling-backend pytorch --grammar-backend none"
END
echo "ready: . $HOST/env.sh"
