#!/usr/bin/env bash
# Start the first node of a Ray cluster; run this on the machine from which you will start runs.
#
#   bash start_head.sh [more options of `ray start`]
set -euo pipefail
source "$(dirname "$0")/ray_env.sh"

port=${RAY_PORT:-6379}
if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
    echo "port $port is in use on this machine, perhaps by a Ray that runs already (\`ray status\`): set RAY_PORT to another one" >&2
    exit 1
fi
ray start --head --port="$port" --dashboard-host=127.0.0.1 --disable-usage-stats "$@"

cat <<TEXT

On each other machine, with the same token (see ray_env.sh):
    bash start_worker.sh HOST_OF_THIS_MACHINE:$port
Then, on this machine:
    ray status
    RAY_ADDRESS=127.0.0.1:$port hybridflow train … trainer.nnodes=2 trainer.n_gpus_per_node=8
TEXT
