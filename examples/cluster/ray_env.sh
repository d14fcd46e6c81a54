# Sourced by the launch scripts, on every node, before `ray start`. What is set already stays.

# A node whose processes are gone counts as dead after 4 s, one that does not answer after 12 s. Ray's own: 15 s and 65 s.
# Only the head reads these.
export RAY_health_check_initial_delay_ms=${RAY_health_check_initial_delay_ms:-1000}
export RAY_health_check_period_ms=${RAY_health_check_period_ms:-1000}
export RAY_health_check_timeout_ms=${RAY_health_check_timeout_ms:-2000}
export RAY_health_check_failure_threshold=${RAY_health_check_failure_threshold:-4}

# Who reaches a Ray cluster can run code on it. With a token only those who have it can: the same one on all nodes, in
# RAY_AUTH_TOKEN or ~/.ray/auth_token (`ray get-auth-token --generate` writes it once). Needs Ray 2.52.
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}

# Worker processes compute with one thread each; spinning threads of neighbours cost more than they give.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# Ray starts worker processes at nice 15: beside anything else on the machine they would hardly run.
export RAY_worker_niceness=${RAY_worker_niceness:-0}
