#!/usr/bin/env bash
# Runs the test suite: sets up the environment, then hands every argument to pytest.
#
#   bash tests/run.sh                      everything
#   bash tests/run.sh -k package -x        as `pytest -k package -x`
set -u
source "$(dirname "${BASH_SOURCE[0]}")/../examples/setup.sh"

cd "$DMUON_ROOT" || exit 1
exec "$DMUON_PYTHON" -m pytest "$@"
