#!/bin/sh
# Check hybridflow on one NVIDIA GPU in less than 30 minutes, and write one file to send back.
#
#     scripts/gpu_check.sh [--quick] [--work FOLDER] [--python PYTHON | --no-install] …     (--help says all)
#
# PYTHON names the Python 3.11 or newer that begins; it needs no package.
set -eu
PYTHON=${PYTHON:-python3}
command -v "$PYTHON" > /dev/null || { echo "gpu_check: there is no $PYTHON; say where it is: PYTHON=/path/to/python3.12 $0" >&2; exit 2; }
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "gpu_check: $PYTHON is older than 3.11; say another: PYTHON=python3.12 $0" >&2; exit 2; }
exec "$PYTHON" "$(dirname "$0")/gpu_check.py" "$@"
