#!/usr/bin/env bash
# The part of the launcher that runs on a TPU VM, one copy per worker.
# tpu_vm.sh calls it over ssh; each call ends with one line
# "vigor-worker ANSWER", so that a silent worker cannot pass for a healthy one.
#
#   worker.sh setup                          install this tree's environment
#   worker.sh start RUN WORKDIR COMMAND...   start in tmux, unless it runs
#   worker.sh status RUN                     ready | running | finished |
#                                            failed CODE | interrupted | busy
#   worker.sh stop RUN                       end it; `start` may follow
#   worker.sh supervise RUN WORKDIR          what tmux runs
#
# Everything is under ~/vigor_jax: code/TREE (one environment per tree) and
# runs/RUN (command, log, process, exit_code). A lost ssh connection or
# terminal loses nothing: tmux holds the process, runs/RUN/log its output.
# The call it cut off may go on here, so status, start and stop take turns.

set -u -o pipefail

CODE=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly CODE RUNS=$HOME/vigor_jax/runs SESSION=vigor
readonly UPLOAD_SECONDS=60 STOP_SECONDS=30 TURN_SECONDS=120

answer() { printf 'vigor-worker %s\n' "$*"; }

session_alive() { tmux has-session -t "=$SESSION" 2> /dev/null; }

# take_turn: without it, a look in the middle of a `start` would find a run that
# neither runs nor has ended. In vain means no answer: the launcher asks again.
take_turn() {
  mkdir -p "$RUNS" && exec 9> "$RUNS/turn.lock" && flock -w "$TURN_SECONDS" 9
}

# born PID: REPLY is when it began, in ticks since the boot. A number alone may
# be another process by now.
born() {
  local stat
  stat=$(cat "/proc/$1/stat" 2> /dev/null) || return 1
  # shellcheck disable=SC2086  # words: the state, then 18 more, then the time
  set -- ${stat##*) }
  REPLY=${20}
  [ "$1" != Z ]
}

# trainer_alive FOLDER: whether the process that a run recorded still exists.
trainer_alive() {
  local process began
  [ -f "$1/process" ] && read -r process began < "$1/process" &&
    born "$process" && [ "$REPLY" = "$began" ]
}

setup() {
  mkdir -p "$HOME/vigor_jax"
  # A setup whose connection was lost may still be running: wait for it.
  exec 9> "$HOME/vigor_jax/setup.lock"
  flock 9
  if [ ! -f "$CODE/.venv/ready" ]; then
    install_environment || { answer "setup failed"; return 1; }
  fi
  answer ready
}

install_environment() {
  export PATH=$HOME/.local/bin:$PATH
  if ! command -v tmux > /dev/null; then
    sudo apt-get update -q && sudo apt-get install -q -y tmux || return 1
  fi
  if ! command -v uv > /dev/null; then
    # Newer images protect the system's Python from a bare --user install.
    python3 -m pip install --quiet --user uv ||
      python3 -m pip install --quiet --user --break-system-packages uv ||
      return 1
  fi
  rm -rf "$CODE/.venv"
  uv venv --quiet --python 3.12 "$CODE/.venv" &&
    uv pip install --quiet --python "$CODE/.venv/bin/python" \
      --editable "${CODE}[tpu,tasks]" &&
    "$CODE/.venv/bin/python" -c "import jax, vigor_jax" &&
    touch "$CODE/.venv/ready"
}

# state RUN: REPLY is the answer of `status`.
state() {
  local folder=$RUNS/$1 current="" code alive=no
  # Before the exit code is looked for: a session that is gone by now has
  # written it. The other way round, a run that ends between the two looks
  # would pass for an interrupted one and be started again.
  if session_alive; then alive=yes; fi
  if [ -f "$RUNS/current" ]; then current=$(< "$RUNS/current"); fi
  if [ "$alive" = yes ] && [ "$current" != "$1" ]; then
    REPLY="busy $current"
  elif [ -f "$folder/exit_code" ]; then
    code=$(< "$folder/exit_code")
    if [ "$code" = 0 ]; then REPLY=finished; else REPLY="failed $code"; fi
  elif [ "$alive" = yes ]; then
    REPLY=running
  elif [ -f "$folder/started" ]; then
    # Neither running nor ended: the VM was rebooted, or tmux was killed.
    REPLY=interrupted
  elif [ -f "$CODE/.venv/ready" ]; then
    REPLY=ready
  else
    REPLY=absent
  fi
}

start() {
  local run=$1 workdir=$2 folder=$RUNS/$1
  shift 2
  state "$run"
  case $REPLY in
    running | finished | busy*) answer "$REPLY"; return ;;
    absent) answer absent; return 1 ;;
  esac
  mkdir -p "$folder"
  # A session that has just written its exit code may still be closing; one
  # that was killed may have left its trainer.
  end_trainer "$folder"
  rm -f "$folder/exit_code" "$folder/process" "$folder/stopping"
  printf '%s\n' "$@" > "$folder/command"
  printf '%s\n' "$run" > "$RUNS/current"
  date -u +%Y%m%dT%H%M%SZ > "$folder/started"
  # tmux hands its argument to a shell; RUN and WORKDIR are checked by
  # tpu_vm.sh to hold no character that a shell reads, the path is quoted.
  # The lock is not for the session to keep.
  if ! tmux new-session -d -s "$SESSION" \
    "bash '$CODE/launch/worker.sh' supervise '$run' '$workdir'" 9>&-; then
    answer "failed tmux"
    return 1
  fi
  answer running
}

# Run the command to its end. The log goes to gs:// every minute: a preempted
# VM takes its disk with it.
supervise() {
  local run=$1 workdir=$2 folder=$RUNS/$1 command=() line code=0 remote
  local ending=no started process=""
  # A trainer may save and exit with 0 when its VM is taken away or when it is
  # stopped: that is an end, not a finish. A session that goes takes it along.
  trap 'ending=yes; ask_to_end "$process"' TERM HUP
  while IFS= read -r line; do command+=("$line"); done < "$folder/command"
  started=$(< "$folder/started")
  remote=$workdir/launch/$run/logs/$(hostname)-$started.log
  cd "$CODE" || exit 1
  set -m
  PYTHONUNBUFFERED=1 "${command[@]}" >> "$folder/log" 2>&1 < /dev/null &
  process=$!
  if [ "$ending" = yes ]; then ask_to_end "$process"; fi
  born "$process" || REPLY=ended
  printf '%s %s\n' "$process" "$REPLY" > "$folder/process.new"
  mv "$folder/process.new" "$folder/process"
  (
    while sleep "$UPLOAD_SECONDS" && kill -0 "$$"; do
      upload "$folder/log" "$remote"
    done
  ) < /dev/null > /dev/null 2>&1 &
  local uploader=$!
  wait "$process" || code=$?
  # A signal ends the wait, not the trainer: it may be saving.
  if [ "$ending" = yes ]; then see_to_end "$process" born "$process"; fi
  kill -- "-$uploader" 2> /dev/null
  upload "$folder/log" "$remote"
  if [ "$ending" = yes ] || [ -f "$folder/stopping" ]; then code=143; fi
  if [ "$code" -eq 0 ]; then
    # Kept outside the VM: should it be preempted from here on, the launcher
    # must not start over what is finished.
    printf '%s\n' "$run" > "$folder/finished"
    upload "$folder/finished" "$workdir/launch/$run/finished"
  fi
  # A `stop` that lost its patience with us may have been followed by a `start`.
  if [ "$(cat "$folder/started" 2> /dev/null)" != "$started" ]; then return; fi
  printf '%s\n' "$code" > "$folder/exit_code.new"
  mv "$folder/exit_code.new" "$folder/exit_code"
}

# An upload that fails says so in the log; it must not end the training.
upload() {
  gcloud storage cp --quiet "$1" "$2" > "$1.upload" 2>&1 ||
    { printf 'launch: upload to %s failed: ' "$2"; cat "$1.upload"; } \
      >> "${1%/*}/log"
}

# ask_to_end PROCESS: its group, if there is one yet.
ask_to_end() {
  if [ -n "$1" ]; then kill -TERM -- "-$1" 2> /dev/null; fi
}

# see_to_end PROCESS CONDITION...: end its group when the condition still holds
# after STOP_SECONDS.
see_to_end() {
  local process=$1 waited=0
  shift
  while "$@" && [ "$waited" -lt $((STOP_SECONDS * 10)) ]; do
    sleep 0.1
    waited=$((waited + 1))
  done
  # libtpu admits one process per chip: nothing of the old one may survive.
  kill -KILL -- "-$process" 2> /dev/null
}

busy_in() { session_alive || trainer_alive "$1"; }

# end_trainer FOLDER: nothing of this run, and no session, is left.
end_trainer() {
  local folder=$1 process waited=0
  # A session that has only just begun has no trainer yet.
  while session_alive && [ ! -f "$folder/process" ] && [ "$waited" -lt 100 ]; do
    sleep 0.1
    waited=$((waited + 1))
  done
  if [ -f "$folder/process" ] && busy_in "$folder"; then
    read -r process _ < "$folder/process"
    touch "$folder/stopping"
    # SIGTERM first: the trainer may save. Then the session uploads its log and
    # closes by itself.
    ask_to_end "$process"
    see_to_end "$process" busy_in "$folder"
  fi
  tmux kill-session -t "=$SESSION" 2> /dev/null
}

stop() {
  local run=$1 folder=$RUNS/$1
  state "$run"
  case $REPLY in
    absent) answer absent; return ;;
    # Another command's run is ended too: `stop` frees the worker.
    busy*) folder=$RUNS/${REPLY#busy } ;;
  esac
  end_trainer "$folder"
  rm -f "$folder/exit_code" "$folder/started" "$folder/process" \
    "$folder/stopping"
  answer ready
}

verb=${1:-}
if [ "$#" -gt 0 ]; then shift; fi
case $verb in
  setup) setup ;;
  start | stop) take_turn && "$verb" "$@" ;;
  status)
    take_turn || exit 1
    state "$1"
    answer "$REPLY"
    tail -n 1 "$RUNS/$1/log" 2> /dev/null | cut -c -400 | sed 's/^/last: /' ;;
  supervise) supervise "$@" ;;
  *)
    printf 'worker.sh: unknown verb "%s"; legal: %s\n' "$verb" \
      "setup start status stop supervise" >&2
    exit 2 ;;
esac
