#!/usr/bin/env bash
# Add this machine to a Ray cluster.
#
#   bash start_worker.sh HEAD_HOST:6379 [more options of `ray start`]
set -euo pipefail
source "$(dirname "$0")/ray_env.sh"

head=${1:?"say where the head is: bash start_worker.sh HEAD_HOST:6379"}
shift
ray start --address="$head" "$@"
