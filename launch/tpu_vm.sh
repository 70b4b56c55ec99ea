#!/usr/bin/env bash
# Cloud TPU VMs for vigor_jax: from nothing to a finished run, and back to
# nothing. docs/tpu.md is the walk-through.

set -u -o pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly ROOT
# shellcheck source=launch/lib.sh
. "$ROOT/launch/lib.sh"
# shellcheck source=launch/accelerators.sh
. "$ROOT/launch/accelerators.sh"
# shellcheck source=launch/cloud.sh
. "$ROOT/launch/cloud.sh"
# shellcheck source=launch/record.sh
. "$ROOT/launch/record.sh"
# shellcheck source=launch/watch.sh
. "$ROOT/launch/watch.sh"

readonly SELF=launch/tpu_vm.sh
readonly VERBS="up create setup run status logs resume stop delete help"

usage() {
  cat << 'USAGE'
launch/tpu_vm.sh VERB --name=NAME [FLAGS] [-- CONFIG OVERRIDES]

  up       create + setup + run, then watch until the run has finished;
           created again and resumed after every preemption
  create   request the TPU and wait until it is there
  setup    send this code to every worker and install it
  run      start the training on every worker, and return
  resume   do whatever is missing (create, setup, run), then watch like `up`;
           needs --name only, also on another machine (with --workdir)
  status   what exists, and what every worker is doing
  logs     the log of one worker [--node=0 --worker=0 --lines=50 --follow]
  stop     end the training, keep the TPU
  delete   delete the queued resource and its nodes, keep the workdir

where (create, up)                   what (run, up)
  --project=  default: gcloud's        --config=configs/NAME.py
  --zone=     e.g. us-west4-a          --workdir=gs://BUCKET/RUN
  --tpu=      v5e:4x4, v5litepod-16,   -- --config.total_steps=9 ...
              v5p:2x2x2, v6e:4x4, ...
  --slices=1  more than 1: multi-slice
  --spot | --on-demand                 (one of them, no default: price)
  --runtime=  image, default by --tpu  --inputs=gs://BUCKET/FOLDER
                                         copied to inputs/ on every worker
  --create_flag=--network=NAME         any further flag of `queued-resources
                                       create`; repeatable

watching (up, resume)
  --detach            watch in the background: closing the terminal is safe
  --delete_when_done  delete the TPU when the run has finished or given up
  --max_restarts=3    restarts after a failure that is not a preemption
  --poll=30           seconds between looks

everywhere
  --dry-run           print every command, run none
  --ssh_flag=--internal-ip             any further flag of `tpu-vm ssh`
exit codes: 0 done, 1 training failed, 2 wrong argument, 3 refused by Google
Cloud (quota, permission), 4 workers or Google Cloud cannot be reached
USAGE
}

# ------------------------------------------------------------ arguments

parse() {
  local flag value
  NAME="" PROJECT="" ZONE="" TPU="" SLICE_COUNT="" SPOT="" RUNTIME_FLAG=""
  CONFIG="" WORKDIR="" INPUTS="" CODE="" OVERRIDES=() CREATE_FLAGS=() SSH_FLAGS=()
  DETACH=no DELETE_WHEN_DONE=no MAX_RESTARTS=3 POLL=30 PATIENCE=10
  NODE=0 WORKER=0 LINES_WANTED=50 FOLLOW=no
  while [ "$#" -gt 0 ]; do
    flag=${1%%=*} value=""
    case $1 in *=*) value=${1#*=} ;; esac
    one_line "$flag" "$1"
    case $flag in
      --) shift; OVERRIDES=("$@"); break ;;
      --name) NAME=$value ;;
      --project) PROJECT=$value ;;
      --zone) ZONE=$value ;;
      --tpu) TPU=$value ;;
      --slices) SLICE_COUNT=$value ;;
      --spot) SPOT=yes ;;
      --on-demand) SPOT=no ;;
      --runtime) RUNTIME_FLAG=$value ;;
      --create_flag) CREATE_FLAGS+=("$value") ;;
      --ssh_flag) SSH_FLAGS+=("$value") ;;
      --config) CONFIG=$value ;;
      --workdir) WORKDIR=${value%/} ;;
      --inputs) INPUTS=${value%/} ;;
      --detach) DETACH=yes ;;
      --delete_when_done) DELETE_WHEN_DONE=yes ;;
      --max_restarts) MAX_RESTARTS=$value; whole "$flag" "$value" 0 ;;
      --poll) POLL=$value; seconds "$flag" "$value" ;;
      --node) NODE=$value; whole "$flag" "$value" 0 ;;
      --worker) WORKER=$value; whole "$flag" "$value" 0 ;;
      --lines) LINES_WANTED=$value; whole "$flag" "$value" 1 ;;
      --follow) FOLLOW=yes ;;
      --dry-run) DRY_RUN=yes ;;
      *)
        one_of flag "$flag" --name --project --zone --tpu --slices --spot \
          --on-demand --runtime --create_flag --ssh_flag --config --workdir \
          --inputs --detach --delete_when_done --max_restarts --poll --node --worker \
          --lines --follow --dry-run ;;
    esac
    case $flag in
      --spot | --on-demand | --detach | --delete_when_done | --follow | \
        --dry-run)
        if [ "$1" != "$flag" ]; then
          die "$BAD_ARGUMENT" "$flag takes no value; nearest: $flag"
        fi ;;
    esac
    shift
  done
  for value in ${OVERRIDES[@]+"${OVERRIDES[@]}"}; do
    one_line "an override" "$value"
  done
}

check_name() {
  local legal
  case $NAME in
    "")
      die "$BAD_ARGUMENT" "--name is missing" \
        "for example: --name=vigor-3b" ;;
  esac
  legal=$(printf '%s' "$NAME" | tr '[:upper:]_. ' '[:lower:]---' |
    tr -cd 'a-z0-9-' | sed 's/^[^a-z]*//' | cut -c -40 | sed 's/-*$//')
  if [ "$NAME" != "$legal" ]; then
    die "$BAD_ARGUMENT" \
      "--name='$NAME' is not legal; nearest: --name=${legal:-vigor}" \
      "lower-case letters, digits and -, a letter first, at most 40"
  fi
}

# check_place: what create, and everything after it, must know.
check_place() {
  if [ -z "$PROJECT" ] && ask gcloud config get-value project; then
    PROJECT=$REPLY
  fi
  if ! [[ $PROJECT =~ ^([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]$ ]]; then
    if [ -z "$PROJECT" ]; then
      die "$BAD_ARGUMENT" "--project is missing, and gcloud has no default" \
        "yours: gcloud projects list"
    fi
    die "$BAD_ARGUMENT" "--project='$PROJECT' is not a project id" \
      "yours: gcloud projects list"
  fi
  if ! [[ $ZONE =~ ^[a-z]+-[a-z]+[0-9]+-[a-z]$ ]]; then
    die "$BAD_ARGUMENT" "--zone='$ZONE' is not a zone, such as us-west4-a" \
      "zones with TPUs: gcloud compute tpus locations list --project=$PROJECT"
  fi
  resolve_slice "$TPU"
  if [ -n "$RUNTIME_FLAG" ]; then RUNTIME=$RUNTIME_FLAG; fi
  SLICE_COUNT=${SLICE_COUNT:-1}
  whole --slices "$SLICE_COUNT" 1
  if [ -z "$SPOT" ]; then
    die "$BAD_ARGUMENT" "choose --spot or --on-demand" \
      "spot is cheaper and can be taken away at any moment; a run started" \
      "with 'up' continues by itself" \
      "prices: https://cloud.google.com/tpu/pricing"
  fi
  node_names
}

check_workdir() {
  if ! [[ $WORKDIR =~ ^gs://[a-z0-9][a-z0-9._-]+/[A-Za-z0-9._/-]+$ ]]; then
    die "$BAD_ARGUMENT" "--workdir='$WORKDIR' is not gs://BUCKET/RUN" \
      "nearest: --workdir=gs://${PROJECT:-my-bucket}-vigor/$NAME" \
      "checkpoints must outlive the VMs, so they go to Cloud Storage"
  fi
  if [ -n "$INPUTS" ] &&
    ! [[ $INPUTS =~ ^gs://[a-z0-9][a-z0-9._-]+(/[A-Za-z0-9._/-]+)?$ ]]; then
    die "$BAD_ARGUMENT" "--inputs='$INPUTS' is not gs://BUCKET/FOLDER" \
      "a new VM must be able to fetch it, so it is in Cloud Storage"
  fi
}

# build_command: the training command, and RUN_ID, which names it.
build_command() {
  if [ -z "$CONFIG" ]; then
    die "$BAD_ARGUMENT" "no run of $NAME is recorded" \
      "start one: $SELF up --name=$NAME ..., or 'run' on an existing TPU"
  fi
  COMMAND=(.venv/bin/python -m vigor_jax.train "--config=$CONFIG"
    "--workdir=$WORKDIR" ${OVERRIDES[@]+"${OVERRIDES[@]}"})
  quote "$CODE" "${COMMAND[@]}"
  RUN_ID=$(printf '%s' "$REPLY" | git hash-object --stdin | cut -c -12)
}

# snapshot_code: CODE names the tree of files as they are now, committed or
# not, .gitignore respected. A second index leaves the user's own alone.
snapshot_code() {
  if ! git -C "$ROOT" rev-parse --git-dir > /dev/null 2>&1; then
    die "$BAD_ARGUMENT" "$ROOT is not a git checkout, so its files cannot be" \
      "named and sent: (cd '$ROOT' && git init && git add --all)"
  fi
  CODE=$(export GIT_INDEX_FILE=$SCRATCH/index &&
    git -C "$ROOT" add --all && git -C "$ROOT" write-tree) ||
    die "$BAD_ARGUMENT" "git could not read the files of $ROOT"
}

# ------------------------------------------------------------ verbs

verb_up() {
  check_place
  check_workdir
  existing_config "$CONFIG" "$ROOT"
  snapshot_code
  build_command
  refuse_moved_record
  save_record
  watch
}

verb_create() {
  check_place
  if [ -n "$WORKDIR" ]; then check_workdir; fi
  refuse_moved_record
  save_record
  ensure_active
  note "next: $SELF setup --name=$NAME --workdir=gs://BUCKET/RUN"
}

verb_setup() {
  recall
  check_place
  check_workdir
  snapshot_code
  need_active
  save_record
  setup_workers
  count ready
  if [ "$DRY_RUN" != yes ] && [ "$REPLY" -lt "${#ANSWERS[@]}" ]; then
    unready
    show_output "$FIRST"
    die "$UNREACHABLE" "setup failed on worker $FIRST" \
      "running the same command again is safe"
  fi
  note "next: $SELF run --name=$NAME --config=configs/NAME.py"
}

verb_run() {
  recall
  check_place
  check_workdir
  existing_config "$CONFIG" "$ROOT"
  if [ -z "$CODE" ]; then snapshot_code; fi
  build_command
  need_active
  save_record
  start_workers
  if [ "$DRY_RUN" = yes ]; then return; fi
  report_answers
  count running
  if [ "$REPLY" -lt "${#ANSWERS[@]}" ]; then
    count busy
    if [ "$REPLY" -gt 0 ]; then
      die "$BAD_ARGUMENT" "worker $FIRST runs another command" \
        "wait for it, or end it first: $SELF stop --name=$NAME"
    fi
    count finished
    if [ "$REPLY" -eq "${#ANSWERS[@]}" ]; then
      note "this run has already finished: $WORKDIR"
      return
    fi
    die "$UNREACHABLE" "not every worker runs" \
      "$SELF setup --name=$NAME, then run again (both are safe to repeat)"
  fi
  cost_notice
  note "it runs without this terminal. A preemption is only repaired while" \
    "something watches: $SELF resume --name=$NAME --detach"
}

verb_resume() {
  recall
  check_place
  check_workdir
  build_command
  save_record
  SEEN_ACTIVE=yes
  watch
}

verb_status() {
  recall
  check_place
  SIMULATED_STATE=ACTIVE SIMULATED_WORKERS=running
  observe
  note "$NAME: $TPU_STATE${REASON:+ ($REASON)}, $ACCELERATOR x $SLICE_COUNT" \
    "in $ZONE, project $PROJECT"
  if [ -n "$WORKDIR" ]; then note "workdir: $WORKDIR"; fi
  if [ "$TPU_STATE" = UNKNOWN ]; then exit "$UNREACHABLE"; fi
  if [ "$TPU_STATE" = ABSENT ]; then
    note "no TPU, no cost but storage; to go on: $SELF resume --name=$NAME"
  fi
  if [ "$TPU_STATE" != ACTIVE ]; then return; fi
  if [ -n "$CODE" ] && [ -n "$CONFIG" ]; then
    build_command
    tell_workers status "$RUN_ID"
    report_answers
  else
    note "no run yet: $SELF run --name=$NAME --config=configs/NAME.py"
  fi
  cost_notice
}

report_answers() {
  local answer where
  for answer in "${ANSWERS[@]}"; do
    where=${answer%% *}
    note "  worker $where: ${answer#* }" \
      "$(sed -n 's/^last: /| /p' "$SCRATCH/output/${where%/*}/${where#*/}.log" \
        2> /dev/null)"
  done
}

verb_logs() {
  local follow=""
  recall
  check_place
  check_workdir
  build_command
  if [ "$NODE" -ge "$SLICE_COUNT" ]; then
    die "$BAD_ARGUMENT" "--node=$NODE does not exist; nearest:" \
      "--node=$((SLICE_COUNT - 1))"
  fi
  if [ "$FOLLOW" = yes ]; then follow=" -F"; fi
  ssh_command "${NODES[$NODE]}" "$WORKER" \
    "tail -n $LINES_WANTED$follow \$HOME/vigor_jax/runs/$RUN_ID/log"
  run "${SSH[@]}" && return
  die "$UNREACHABLE" "worker $NODE/$WORKER could not be read" \
    "the logs of machines that are gone are kept:" \
    "gcloud storage ls '$WORKDIR/launch/$RUN_ID/logs/'"
}

verb_stop() {
  recall
  check_place
  check_workdir
  build_command
  need_active
  tell_workers stop "$RUN_ID" ||
    die "$UNREACHABLE" "not every worker answered; repeat the command"
  note "stopped; the checkpoints are in $WORKDIR"
  cost_notice
}

verb_delete() {
  recall
  check_place
  delete_tpu
  note "$NAME is deleted: no queued resource, no node. Storage keeps costing" \
    "until you remove it:"
  note "  gcloud storage rm -r ${WORKDIR:-gs://BUCKET/RUN}"
  note "to go on with the run later: $SELF resume --name=$NAME"
}

need_active() {
  SIMULATED_STATE=ACTIVE
  observe
  if [ "$DRY_RUN" = yes ] || [ "$TPU_STATE" = ACTIVE ]; then return; fi
  die "$REFUSED" "$NAME is $TPU_STATE${REASON:+ ($REASON)}, not ACTIVE" \
    "$SELF resume --name=$NAME creates what is missing"
}

main() {
  local verb=${1:-help}
  if [ "$#" -gt 0 ]; then shift; fi
  case $verb in -h | --help) verb=help ;; esac
  # shellcheck disable=SC2086  # a list of words
  one_of verb "$verb" $VERBS
  if [ "$verb" = help ]; then usage; return; fi
  SCRATCH=$(mktemp -d) || exit "$BAD_ARGUMENT"
  trap 'rm -rf "$SCRATCH"; release_lock' EXIT
  SEEN_ACTIVE=no FINISHED=no PREEMPTIONS=0 RUN_ID="" SHOWN="" STORED=no
  parse "$@"
  check_name
  "verb_$verb"
}

main "$@"
