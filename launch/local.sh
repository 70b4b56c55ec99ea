#!/usr/bin/env bash
# Run a config on this machine: as it is, on N fake CPU devices, or as N
# processes that form one job, the way the workers of a pod do.

set -u -o pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly ROOT
# shellcheck source=launch/lib.sh
. "$ROOT/launch/lib.sh"

usage() {
  cat << 'USAGE'
launch/local.sh --config=configs/NAME.py --workdir=DIR [FLAGS] [-- OVERRIDES]

  --devices=N     N fake CPU devices (in each process)
  --processes=N   N processes joined by jax.distributed on 127.0.0.1;
                  output in DIR/launch/process-0.log, ...; process 0 is shown
  --port=29421    the coordinator's port, for --processes
  --grace=90      seconds in which the others must end when one has failed
  --python=PATH   default: .venv/bin/python, else python3
  --dry-run       print every command, run none

A run that was ended goes on from DIR when the same command is given again.
Exit codes: 0 done, 1 the training failed, 2 wrong argument.
USAGE
}

parse() {
  local flag value
  CONFIG="" WORKDIR="" DEVICES="" PROCESSES=1 PORT=29421 GRACE=90 PYTHON=""
  OVERRIDES=()
  while [ "$#" -gt 0 ]; do
    flag=${1%%=*} value=""
    case $1 in *=*) value=${1#*=} ;; esac
    case $flag in
      --) shift; OVERRIDES=("$@"); break ;;
      --config) CONFIG=$value ;;
      --workdir) WORKDIR=$value ;;
      --devices) DEVICES=$value; whole "$flag" "$value" 1 ;;
      --processes) PROCESSES=$value; whole "$flag" "$value" 1 ;;
      --port) PORT=$value; whole "$flag" "$value" 1024 ;;
      --grace) GRACE=$value; whole "$flag" "$value" 0 ;;
      --python) PYTHON=$value ;;
      --dry-run) DRY_RUN=yes ;;
      -h | --help) usage; exit 0 ;;
      *)
        one_of flag "$flag" --config --workdir --devices --processes --port \
          --grace --python --dry-run --help ;;
    esac
    shift
  done
  existing_config "$CONFIG" "$ROOT"
  if [ "$PORT" -gt 65535 ]; then
    die "$BAD_ARGUMENT" "--port='$PORT' is too large; nearest: --port=65535"
  fi
  case $WORKDIR in
    "") die "$BAD_ARGUMENT" "--workdir is missing" \
          "for example: --workdir=runs/first" ;;
    gs://*) ;;
    /*) ;;
    *) WORKDIR=$PWD/$WORKDIR ;;
  esac
  if [ -z "$PYTHON" ]; then
    PYTHON=python3
    if [ -x "$ROOT/.venv/bin/python" ]; then PYTHON=$ROOT/.venv/bin/python; fi
  fi
  if ! command -v "$PYTHON" > /dev/null; then
    die "$BAD_ARGUMENT" "--python='$PYTHON' cannot be run"
  fi
}

# environment INDEX: sets ENVIRONMENT, the variables of process INDEX.
environment() {
  ENVIRONMENT=(PYTHONUNBUFFERED=1)
  if [ -n "$DEVICES" ] || [ "$PROCESSES" -gt 1 ]; then
    ENVIRONMENT+=(JAX_PLATFORMS=cpu "XLA_FLAGS=${XLA_FLAGS:+$XLA_FLAGS }\
--xla_force_host_platform_device_count=${DEVICES:-1}")
  fi
  if [ "$PROCESSES" -gt 1 ]; then
    ENVIRONMENT+=("JAX_COORDINATOR_ADDRESS=127.0.0.1:$PORT"
      "JAX_NUM_PROCESSES=$PROCESSES" "JAX_PROCESS_ID=$1")
  fi
}

# end_all SIGNAL: to every process that still runs.
end_all() {
  local index
  for index in ${PIDS[@]+"${!PIDS[@]}"}; do
    if [ -n "${CODES[$index]:-}" ]; then continue; fi
    kill "-$1" "${PIDS[$index]}" 2> /dev/null
  done
}

# show FILE: what was added to it since the last time. SHOWN counts its bytes.
show() {
  local size
  size=$(wc -c < "$1")
  if [ "$size" -le "$SHOWN" ]; then return; fi
  tail -c "+$((SHOWN + 1))" "$1" | head -c "$((size - SHOWN))"
  SHOWN=$((size))
}

# alive: REPLY is how many still run; collects the exit codes of the others in
# CODES, and in FAILED whether one of them is not 0.
alive() {
  local index code
  REPLY=0
  for index in "${!PIDS[@]}"; do
    if [ -n "${CODES[$index]:-}" ]; then continue; fi
    if kill -0 "${PIDS[$index]}" 2> /dev/null; then
      REPLY=$((REPLY + 1))
      continue
    fi
    code=0
    wait "${PIDS[$index]}" || code=$?
    CODES[index]=$code
    if [ "$code" -ne 0 ]; then FAILED=yes; fi
  done
}

# run_processes: start them, wait, and end the rest when one has failed.
run_processes() {
  local index logs waited=0
  # Logs must be on this machine even when the workdir is not.
  logs=$WORKDIR/launch
  case $WORKDIR in
    gs://*) logs=$PWD/runs/$(basename "$WORKDIR")/launch ;;
  esac
  PIDS=() CODES=() FAILED=no SHOWN=0
  if [ "$DRY_RUN" = no ]; then
    mkdir -p "$logs" || exit "$BAD_ARGUMENT"
    trap 'end_all TERM; wait; exit 130' INT TERM
  fi
  for ((index = 0; index < PROCESSES; index++)); do
    environment "$index"
    quote env "${ENVIRONMENT[@]}" "${COMMAND[@]}"
    if [ "$DRY_RUN" = yes ]; then printf '%s &\n' "$REPLY"; continue; fi
    say "+ $REPLY > $logs/process-$index.log"
    env "${ENVIRONMENT[@]}" "${COMMAND[@]}" \
      > "$logs/process-$index.log" 2>&1 < /dev/null &
    PIDS+=($!)
  done
  if [ "$DRY_RUN" = yes ]; then printf 'wait\n'; return; fi
  while alive; [ "$REPLY" -gt 0 ]; do
    if [ "$FAILED" = yes ]; then waited=$((waited + 1)); fi
    if [ "$waited" -gt $((GRACE * 5)) ]; then
      say "one process failed, the others did not notice within $GRACE s:" \
        "ending them"
      end_all KILL
    fi
    show "$logs/process-0.log"
    sleep 0.2
  done
  show "$logs/process-0.log"
  if [ "$FAILED" = no ]; then return; fi
  for index in "${!CODES[@]}"; do
    if [ "${CODES[$index]}" -eq 0 ]; then continue; fi
    say "process $index ended with ${CODES[$index]}: $logs/process-$index.log"
    tail -n 5 "$logs/process-$index.log" | sed 's/^/  | /' >&2
  done
  exit "$TRAINING_FAILED"
}

parse "$@"
cd "$ROOT" || exit "$BAD_ARGUMENT"
COMMAND=("$PYTHON" -m vigor_jax.train "--config=$CONFIG" "--workdir=$WORKDIR"
  ${OVERRIDES[@]+"${OVERRIDES[@]}"})
if [ "$PROCESSES" -gt 1 ]; then
  run_processes
else
  environment 0
  status=0
  run env "${ENVIRONMENT[@]}" "${COMMAND[@]}" || status=$?
  case $status in
    # The trainer's own code for a config it refuses.
    "$OK" | "$BAD_ARGUMENT") exit "$status" ;;
    *) exit "$TRAINING_FAILED" ;;
  esac
fi
