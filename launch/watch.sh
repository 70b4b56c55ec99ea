# shellcheck shell=bash
# From any state to a finished run: the steps, and the loop that takes whichever
# is missing. Sourced by tpu_vm.sh, whose globals it reads.

cost_notice() {
  local price=on-demand
  if [ "$SPOT" = yes ]; then price=spot; fi
  note "COST: $((CHIPS * SLICE_COUNT)) chips ($ACCELERATOR x $SLICE_COUNT," \
    "$price, $ZONE) are billed from ACTIVE until they are deleted, training" \
    "or idle. To stop paying:"
  note "  $SELF delete --name=$NAME"
}

# ensure_active: 0 when every node is ready. Waits in the queue, replaces what
# was preempted, dies when Google Cloud refuses for good.
ensure_active() {
  local tries=0 blind=0 waited=no refusal
  while :; do
    observe
    if [ "$TPU_STATE" != UNKNOWN ]; then blind=0; fi
    if [ "$TPU_STATE $REASON" != "$SHOWN" ]; then
      SHOWN="$TPU_STATE $REASON"
      note "$(date -u +%H:%M:%S) $NAME: $TPU_STATE${REASON:+ ($REASON)}"
    fi
    case $TPU_STATE in
      ACTIVE)
        SEEN_ACTIVE=yes
        if [ "$waited" = yes ]; then cost_notice; fi
        return ;;
      ABSENT)
        if already_finished; then FINISHED=yes; return; fi
        waited=yes
        if create_tpu; then tries=0; continue; fi ;;
      GONE)
        PREEMPTIONS=$((PREEMPTIONS + 1))
        note "preempted ($PREEMPTIONS so far): deleting the remains, creating" \
          "again; the run will go on from its last checkpoint"
        delete_tpu
        continue ;;
      FAILED)
        # A failed request counts against the quota until it is deleted.
        refusal=$REASON
        delete_tpu
        REASON=$refusal ;;
      WAITING) waited=yes; sleep "$POLL"; continue ;;
      LEAVING) sleep "$POLL"; continue ;;
      UNKNOWN)
        blind=$((blind + 1))
        if [ "$blind" -ge "$PATIENCE" ]; then
          die "$UNREACHABLE" "Google Cloud does not answer: $REASON" \
            "what runs goes on running (and costing); look again with:" \
            "$SELF resume --name=$NAME"
        fi
        sleep "$POLL"
        continue ;;
    esac
    # Here: the request was refused. A quota that was enough a moment ago may
    # only be waiting for the preempted nodes to be counted out.
    if [ "$SEEN_ACTIVE" = no ] && is_quota "$REASON"; then
      die_of_quota "$REASON"
    fi
    tries=$((tries + 1))
    if [ "$tries" -ge "$PATIENCE" ]; then
      if is_quota "$REASON"; then die_of_quota "$REASON"; fi
      die "$REFUSED" "refused $tries times: $REASON" \
        "nothing runs, and only the workdir costs money; later:" \
        "$SELF resume --name=$NAME"
    fi
    note "refused ($REASON); try $((tries + 1)) of $PATIENCE follows"
    sleep "$(awk -v p="$POLL" -v n="$tries" \
      'BEGIN { s = p * 2 ^ n; print (s > 600 && p < 600) ? 600 : s }')"
  done
}

# The mark that a worker leaves in the workdir when the training ended well.
already_finished() {
  if [ -z "${RUN_ID:-}" ] || [ "$DRY_RUN" = yes ]; then return 1; fi
  ask gcloud storage ls "$WORKDIR/launch/$RUN_ID/finished"
}

worker_script() { REPLY="\$HOME/vigor_jax/code/$CODE/launch/worker.sh"; }

# tell_workers VERB [ARG...]: have every worker run worker.sh; a worker without
# this tree answers "absent".
tell_workers() {
  local script
  worker_script
  script=$REPLY
  quote "$@"
  on_workers "if [ -f $script ]; then bash $script $REPLY;\
 else echo vigor-worker absent; fi"
}

setup_workers() {
  local url folder="\$HOME/vigor_jax/code/$CODE" inputs=""
  upload_code || return 1
  if [ -n "$INPUTS" ]; then
    # Beside the code, once a VM; linked, so that a command can say inputs/.
    inputs="i=\$HOME/vigor_jax/inputs; mkdir -p \$i;\
 gcloud storage rsync --recursive $INPUTS \$i; ln -sfn \$i \$d/inputs;"
  fi
  url=$WORKDIR/launch/code/$CODE.tar.gz
  SIMULATED_WORKERS=ready
  # Unpacked beside its place, then moved: a lost connection leaves no half.
  # One at a time: what a lost connection left may still be unpacking.
  on_workers "set -e; d=$folder; mkdir -p \$HOME/vigor_jax;\
 (flock 9; if [ ! -f \$d/launch/worker.sh ]; then\
 rm -rf \$d.new; mkdir -p \$d.new;\
 gcloud storage cat $url | tar -xz -C \$d.new;\
 rm -rf \$d; mv \$d.new \$d; fi; $inputs) 9> \$HOME/vigor_jax/unpack.lock;\
 bash \$d/launch/worker.sh setup"
}

start_workers() {
  SIMULATED_WORKERS=running
  tell_workers start "$RUN_ID" "$WORKDIR" "${COMMAND[@]}"
}

# count STATE: how many answers begin with it; FIRST is the first such worker.
count() {
  local answer
  REPLY=0 FIRST=""
  for answer in ${ANSWERS[@]+"${ANSWERS[@]}"}; do
    case ${answer#* } in
      "$1" | "$1 "*)
        REPLY=$((REPLY + 1))
        FIRST=${FIRST:-${answer%% *}} ;;
    esac
  done
}

# look: ask every worker; sets N_RUNNING and its fellows, and N_ALL.
look() {
  tell_workers status "$RUN_ID"
  N_ALL=${#ANSWERS[@]}
  count unreachable; N_SILENT=$REPLY SILENT=$FIRST
  count absent; N_ABSENT=$REPLY
  count ready; N_READY=$REPLY
  count running; N_RUNNING=$REPLY
  count finished; N_FINISHED=$REPLY
  count interrupted; N_BROKEN=$REPLY BROKEN=$FIRST
  count failed; N_BROKEN=$((N_BROKEN + REPLY)) BROKEN=${FIRST:-$BROKEN}
  count busy
  if [ "$REPLY" -gt 0 ]; then
    die "$BAD_ARGUMENT" "worker $FIRST runs another command" \
      "wait for it, or end it first: $SELF stop --name=$NAME"
  fi
}

# refuse_silent WHAT: a worker did not do its part PATIENCE times.
refuse_silent() {
  show_output "$2"
  cost_notice
  die "$UNREACHABLE" "$1 worker $2 failed $PATIENCE times in a row" \
    "$SELF resume --name=$NAME tries again; by hand:" \
    "gcloud compute tpus tpu-vm ssh ${2%/*} --worker=${2#*/} \
--zone=$ZONE --project=$PROJECT"
}

# ------------------------------------------------------------ the watch loop

# converge: whatever state things are in, take the next step towards a finished
# run; return when it has finished, die when it has given up. Each turn looks
# anew, so a preemption between any two steps is found by the next turn.
converge() {
  local failures=0 silent=0 setups=0 grace=0 progress last="" preempted=0
  while :; do
    ensure_active
    if [ "$FINISHED" = yes ]; then break; fi
    if [ "$PREEMPTIONS" -ne "$preempted" ]; then
      # A VM that is being taken away makes its trainer fail shortly before it
      # goes: not the training's fault.
      preempted=$PREEMPTIONS failures=0
    fi
    if [ "$DRY_RUN" = yes ] && [ "$SIMULATED_WORKERS" = running ]; then
      SIMULATED_WORKERS=finished
    fi
    look
    if [ "$N_SILENT" -gt 0 ]; then
      silent=$((silent + 1))
      note "worker $SILENT does not answer ($silent of $PATIENCE)"
      if [ "$silent" -ge "$PATIENCE" ]; then
        refuse_silent "ssh to" "$SILENT"
      fi
      sleep "$POLL"
      continue
    fi
    silent=0
    if [ "$N_FINISHED" -eq "$N_ALL" ]; then break; fi
    if [ "$N_ABSENT" -gt 0 ]; then
      note "setting up $N_ABSENT of $N_ALL workers (a first time takes minutes)"
      setup_workers
      count ready
      if [ "$REPLY" -lt "$N_ALL" ]; then
        setups=$((setups + 1))
        unready
        note "setup of worker $FIRST failed ($setups of $PATIENCE)"
        if [ "$setups" -ge "$PATIENCE" ]; then
          refuse_silent "setup of" "$FIRST"
        fi
        sleep "$POLL"
      else
        setups=0
      fi
      continue
    fi
    if [ "$N_BROKEN" -gt 0 ] ||
      { [ "$N_FINISHED" -gt 0 ] && [ "$N_READY" -gt 0 ]; }; then
      # The other hosts notice a dead one by themselves, with a message that
      # belongs in their logs: give them two looks before ending them.
      if [ "$N_RUNNING" -gt 0 ] && [ "$grace" -lt 2 ]; then
        grace=$((grace + 1))
        sleep "$POLL"
        continue
      fi
      grace=0
      restart_or_give_up
      continue
    fi
    grace=0
    if [ "$N_READY" -gt 0 ]; then
      note "starting the training on $N_READY of $N_ALL workers"
      start_workers
      continue
    fi
    progress=$(sed -n 's/^last: //p' \
      "$SCRATCH/output/${NODES[0]}/0.log" 2> /dev/null)
    if [ "$progress" != "$last" ]; then
      last=$progress
      if ! in_workdir; then progress+=" (nothing in $WORKDIR yet)"; fi
      note "$(date -u +%H:%M:%S) $N_RUNNING running: $progress"
    fi
    sleep "$POLL"
  done
  if [ "$DRY_RUN" = yes ]; then
    note "the last look is repeated every $POLL s until every worker is done"
  fi
  # Deleting VMs whose results never left them would lose everything.
  if [ "$DRY_RUN" = no ] && ! in_workdir; then
    cost_notice
    die "$TRAINING_FAILED" "the training ended well, but there is no" \
      "$WORKDIR/metrics.jsonl: the TPU is kept, look for the results there"
  fi
  note "finished: $WORKDIR"
  end_of_run
}

# in_workdir: whether the training has written to the bucket.
in_workdir() {
  if [ "$STORED" = no ] &&
    ask gcloud storage ls "$WORKDIR/metrics.jsonl"; then
    STORED=yes
  fi
  [ "$STORED" = yes ]
}

# unready: FIRST is the first worker whose last answer is not "ready".
unready() {
  local answer
  FIRST=""
  for answer in "${ANSWERS[@]}"; do
    if [ "${answer#* }" != ready ]; then FIRST=${answer%% *}; return; fi
  done
}

restart_or_give_up() {
  BROKEN=${BROKEN:-${ANSWERS[0]%% *}}
  show_worker_log "$BROKEN"
  count "failed 2"
  if [ "$REPLY" -gt 0 ]; then
    # The trainer's own code for a config it refuses: so would every restart.
    note "the training refused its config on worker $FIRST"
    end_of_run
    exit "$BAD_ARGUMENT"
  fi
  if [ "$failures" -ge "$MAX_RESTARTS" ]; then
    note "the training ended with an error on worker $BROKEN," \
      "$((failures + 1)) times (--max_restarts=$MAX_RESTARTS)"
    note "logs: $WORKDIR/launch/$RUN_ID/logs/"
    end_of_run
    exit "$TRAINING_FAILED"
  fi
  failures=$((failures + 1))
  note "the training ended on worker $BROKEN without a preemption:" \
    "restart $failures of $MAX_RESTARTS, from its last checkpoint"
  tell_workers stop "$RUN_ID"
}

show_worker_log() {
  ssh_command "${1%/*}" "${1#*/}" \
    "tail -n 20 \$HOME/vigor_jax/runs/$RUN_ID/log"
  "${SSH[@]}" < /dev/null 2>&1 | sed 's/^/  | /' >&2
}

end_of_run() {
  if [ "$DELETE_WHEN_DONE" = yes ]; then
    delete_tpu
    note "deleted $NAME; only $WORKDIR keeps costing (storage)"
  elif [ "$FINISHED" = no ]; then
    cost_notice
  fi
}

# on_interrupt: a lost or closed terminal ends the watching, nothing else.
on_interrupt() {
  say ""
  say "watching ended; what runs on the TPU goes on. Watch again with:"
  say "  $SELF resume --name=$NAME"
  cost_notice
  exit 130
}

watch() {
  if [ "$DRY_RUN" = yes ]; then converge; return; fi
  if [ "$DETACH" = yes ]; then detach; return; fi
  take_lock
  trap on_interrupt INT TERM HUP
  converge
}

# detach: the same watch, by a process that no terminal can end.
detach() {
  local log=$RECORDS/$NAME.watch.log
  local again=("$ROOT/$SELF" resume "--name=$NAME" "--poll=$POLL"
    "--max_restarts=$MAX_RESTARTS")
  if [ "$DELETE_WHEN_DONE" = yes ]; then again+=(--delete_when_done); fi
  again+=(${SSH_FLAGS[@]+"${SSH_FLAGS[@]/#/--ssh_flag=}"})
  (trap '' HUP INT; exec nohup bash "${again[@]}" >> "$log" 2>&1 < /dev/null) &
  disown "$!"
  say "watching in the background (process $!): tail -f $log"
}
