#!/usr/bin/env bash
# Checks and times the kernels on one GPU, in under six minutes, without internet and without nvcc.
#
# Before, where there is nvcc (no GPU needed), compile what the GPU will need; takes minutes:
#   python examples/gpu_check.py --build sm_90a --cache gpu-cache
# Then, on the GPU:
#   bash examples/gpu_check.sh --cache gpu-cache --json gpu_check.json
#
#   PYTHON        an interpreter with torch; dmuon-megatron and tilelang may be missing from it
#   DMUON_WHEELS  a folder with wheels of what is missing, made by
#                 `pip wheel --no-deps -w wheels . tilelang apache-tvm-ffi ...`; they are installed
#                 into an environment of their own that sees PYTHON's packages
# Without DMUON_WHEELS, PYTHON must have everything installed. All arguments go to gpu_check.py.
set -eu
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}

if [ -n "${DMUON_WHEELS:-}" ]; then
    environment=$(mktemp -d)
    trap 'rm -rf "$environment"' EXIT
    "$python" -m venv --system-site-packages "$environment"
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check \
        --no-index --no-deps "$DMUON_WHEELS"/*.whl
    python=$environment/bin/python
fi
# not exec: the environment is removed at the end
timeout 350 "$python" "$here/gpu_check.py" "$@"
