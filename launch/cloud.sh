# shellcheck shell=bash
# Every call to Google Cloud that tpu_vm.sh makes: look at the queued resource,
# create it, delete it, run a command on all workers, keep files in gs://.
# Sourced by tpu_vm.sh, whose globals (NAME, ZONE, ...) it reads.

# What a dry run pretends to see; the real thing is asked otherwise.
SIMULATED_STATE=ABSENT
SIMULATED_WORKERS=absent

# ask COMMAND...: run a read-only command. REPLY is its standard output, ERRORS
# what it wrote to standard error; the exit status is the command's.
ask() {
  local status=0
  REPLY=$("$@" 2> "$SCRATCH/errors") || status=$?
  ERRORS=$(< "$SCRATCH/errors")
  return "$status"
}

# The name of every node (slice) of the queued resource. Google Cloud numbers
# the slices of a multi-slice request itself: PREFIX-0, PREFIX-1, ...
node_names() {
  local index
  LIST_COMMAND="gcloud compute tpus queued-resources list --zone=$ZONE \
--project=$PROJECT"
  NODES=()
  if [ "$SLICE_COUNT" -eq 1 ]; then NODES=("$NAME"); return; fi
  for ((index = 0; index < SLICE_COUNT; index++)); do
    NODES+=("$NAME-$index")
  done
}

# observe: sets TPU_STATE, and WORKERS (VMs per node) when it is ACTIVE.
#   ABSENT   there is no such queued resource
#   WAITING  queued, or being provisioned
#   ACTIVE   every node is ready
#   LEAVING  being taken away
#   GONE     preempted: it must be deleted (it counts against the quota) and
#            created again
#   FAILED   the request was refused; REASON says why
#   UNKNOWN  Google Cloud could not be asked; nothing may be concluded
observe() {
  local node state count describe
  describe=(gcloud compute tpus queued-resources describe "$NAME"
    "--project=$PROJECT" "--zone=$ZONE" "--format=value(state.state)")
  REASON="" WORKERS=1
  if [ "$DRY_RUN" = yes ]; then
    run "${describe[@]}"
    TPU_STATE=$SIMULATED_STATE
    if [ "$TPU_STATE" != ACTIVE ]; then return; fi
    WORKERS=$VMS
    for node in "${NODES[@]}"; do
      run gcloud compute tpus tpu-vm describe "$node" "--project=$PROJECT" \
        "--zone=$ZONE" "--format=value(state,networkEndpoints.len())"
    done
    return
  fi
  if ! ask "${describe[@]}"; then
    TPU_STATE=UNKNOWN REASON=$ERRORS
    case $ERRORS in
      *NOT_FOUND* | *"not found"*) TPU_STATE=ABSENT REASON="" ;;
      *) explain_refusal "$ERRORS" ;;
    esac
    return
  fi
  case $REPLY in
    ACTIVE) TPU_STATE=ACTIVE ;;
    SUSPENDED) TPU_STATE=GONE ;;
    SUSPENDING | DELETING) TPU_STATE=LEAVING ;;
    FAILED)
      TPU_STATE=FAILED
      ask gcloud compute tpus queued-resources describe "$NAME" \
        "--project=$PROJECT" "--zone=$ZONE" \
        "--format=value(state.failedData.error.message)" || true
      REASON=$REPLY ;;
    *) TPU_STATE=WAITING REASON=$REPLY ;;
  esac
  if [ "$TPU_STATE" != ACTIVE ]; then return; fi
  # A preempted node can be visible before the queued resource says so.
  for node in "${NODES[@]}"; do
    if ! ask gcloud compute tpus tpu-vm describe "$node" \
      "--project=$PROJECT" "--zone=$ZONE" \
      "--format=value(state,networkEndpoints.len())"; then
      case $ERRORS in
        *NOT_FOUND* | *"not found"*) TPU_STATE=GONE REASON="$node is missing" ;;
        *) TPU_STATE=UNKNOWN REASON=$ERRORS ;;
      esac
      return
    fi
    read -r state count <<< "$REPLY"
    case $state in
      READY)
        # No address yet: nobody to talk to, and nobody who could be done.
        if ! [ "${count:-0}" -ge 1 ] 2> /dev/null; then
          TPU_STATE=WAITING REASON="$node has no address"
          return
        fi
        WORKERS=$count ;;
      PREEMPTED | TERMINATED | STOPPED | DELETING)
        TPU_STATE=GONE REASON="$node is $state"; return ;;
      *) TPU_STATE=WAITING REASON="$node is $state"; return ;;
    esac
  done
}

# explain_refusal TEXT: die when no retry can help, with the command that can.
explain_refusal() {
  case $1 in
    *SERVICE_DISABLED* | *"has not been used in project"*)
      die "$REFUSED" "the Cloud TPU API is off in project $PROJECT" \
        "gcloud services enable tpu.googleapis.com --project=$PROJECT" ;;
    *PERMISSION_DENIED* | *"does not have permission"*)
      die "$REFUSED" "Google Cloud denied access to project $PROJECT: $1" \
        "you need roles/tpu.admin and roles/iam.serviceAccountUser there" ;;
    *"active account"* | *"gcloud auth login"* | *"Reauthentication"*)
      die "$REFUSED" "gcloud is not logged in" "gcloud auth login" ;;
  esac
}

# is_quota TEXT: true for a quota that is exhausted or zero.
is_quota() {
  case $1 in
    *[Qq]uota*) return 0 ;;
    *) return 1 ;;
  esac
}

die_of_quota() {
  die "$REFUSED" "quota refused $ACCELERATOR x $SLICE_COUNT in $ZONE:" "$1" \
    "nothing was created and nothing costs money" \
    "ask for more:" \
    "https://console.cloud.google.com/iam-admin/quotas?project=$PROJECT" \
    "or free some: $LIST_COMMAND" \
    "(suspended and failed requests count until they are deleted)"
}

# create_tpu: ask for the slices. Status 0: requested, or already there.
# Status 1: refused for now, REASON says why.
create_tpu() {
  local command status=0
  command=(gcloud compute tpus queued-resources create "$NAME"
    "--project=$PROJECT" "--zone=$ZONE" "--accelerator-type=$ACCELERATOR"
    "--runtime-version=$RUNTIME")
  if [ "$SLICE_COUNT" -eq 1 ]; then
    command+=("--node-id=$NAME")
  else
    command+=("--node-count=$SLICE_COUNT" "--node-prefix=$NAME")
  fi
  if [ "$SPOT" = yes ]; then command+=(--spot); fi
  command+=(${CREATE_FLAGS[@]+"${CREATE_FLAGS[@]}"} --async --quiet)
  if [ "$DRY_RUN" = yes ]; then
    run "${command[@]}"
    SIMULATED_STATE=ACTIVE
    return
  fi
  quote "${command[@]}"
  say "+ $REPLY"
  ask "${command[@]}" || status=$?
  if [ "$status" -eq 0 ]; then return; fi
  REASON=$ERRORS
  case $ERRORS in
    *ALREADY_EXISTS* | *"already exists"*) return 0 ;;
  esac
  if is_quota "$ERRORS"; then return 1; fi
  explain_refusal "$ERRORS"
  case $ERRORS in
    *INVALID_ARGUMENT* | *NOT_FOUND* | *"not found"*) explain_slice ;;
  esac
  return 1
}

# The zone was asked for something it does not have: say what it has, the
# nearest size of the same family first.
explain_slice() {
  local reason=$ERRORS
  ask gcloud compute tpus accelerator-types list "--project=$PROJECT" \
    "--zone=$ZONE" "--format=value(type)" || REPLY=""
  REPLY=$(printf '%s\n' "$REPLY" | awk -F- -v wanted="$ACCELERATOR" '
    BEGIN { split(wanted, w, "-") }
    $1 == w[1] {
      d = log($2 / w[2]); if (d < 0) d = -d
      if (!seen++ || d < best) { best = d; name = $0 }
    }
    END { print name }')
  die "$BAD_ARGUMENT" "Google Cloud refused $ACCELERATOR in $ZONE: $reason" \
    "nearest type that this zone offers: ${REPLY:-none of this family}" \
    "all: gcloud compute tpus accelerator-types list --zone=$ZONE \
--project=$PROJECT" \
    "zones with TPUs: gcloud compute tpus locations list --project=$PROJECT"
}

# delete_tpu: remove the queued resource and every node, and wait until Google
# Cloud no longer knows them. Safe on anything, also on nothing.
delete_tpu() {
  local node tries=0
  local delete=(gcloud compute tpus queued-resources delete "$NAME"
    "--project=$PROJECT" "--zone=$ZONE" --force --quiet --async)
  while [ "$DRY_RUN" != yes ]; do
    observe
    case $TPU_STATE in
      ABSENT) break ;;
      LEAVING) ;;
      UNKNOWN) tries=$((tries + 1)) ;;
      # --force: the nodes too. It may refuse while it still provisions.
      *) run "${delete[@]}" || tries=$((tries + 1)) ;;
    esac
    if [ "$tries" -ge "$PATIENCE" ]; then
      die "$UNREACHABLE" "$NAME could not be deleted: ${REASON:-see above}" \
        "IT MAY STILL COST MONEY; look:" \
        "$LIST_COMMAND"
    fi
    sleep "$POLL"
  done
  if [ "$DRY_RUN" = yes ]; then run "${delete[@]}"; fi
  # A node can outlive its queued resource: it would cost money unseen.
  for node in "${NODES[@]}"; do
    if [ "$DRY_RUN" != yes ]; then
      ask gcloud compute tpus tpu-vm describe "$node" "--project=$PROJECT" \
        "--zone=$ZONE" "--format=value(state)" || continue
    fi
    run gcloud compute tpus tpu-vm delete "$node" "--project=$PROJECT" \
      "--zone=$ZONE" --quiet
  done
}

# ssh_command NODE WORKER COMMAND: sets SSH.
ssh_command() {
  # Without these, a VM that vanished holds each call for minutes.
  SSH=(gcloud compute tpus tpu-vm ssh "$1" "--project=$PROJECT" "--zone=$ZONE"
    "--worker=$2" --ssh-flag=-oConnectTimeout=20
    --ssh-flag=-oServerAliveInterval=15 --ssh-flag=-oServerAliveCountMax=4
    ${SSH_FLAGS[@]+"${SSH_FLAGS[@]}"} --quiet "--command=$3")
}

# on_workers COMMAND: run it on every worker of every node at once. Each
# worker's output goes to $SCRATCH/output/NODE/WORKER.log; the last line that
# starts with "vigor-worker " is its answer. Sets ANSWERS ("node/worker
# answer", no answer = unreachable). Status 1 when a worker did not answer.
on_workers() {
  local node worker answer silent=0 pids=()
  ANSWERS=()
  rm -rf "$SCRATCH/output"
  for node in "${NODES[@]}"; do
    mkdir -p "$SCRATCH/output/$node"
    ssh_command "$node" all "$1"
    SSH+=("--output-directory=$SCRATCH/output/$node")
    if [ "$DRY_RUN" = yes ]; then
      # The scratch folder is gone after the dry run: a printed command should
      # work when pasted.
      run "${SSH[@]:0:${#SSH[@]}-1}"
      for ((worker = 0; worker < WORKERS; worker++)); do
        ANSWERS+=("$node/$worker $SIMULATED_WORKERS")
      done
      continue
    fi
    "${SSH[@]}" > "$SCRATCH/output/$node/gcloud" 2>&1 < /dev/null &
    pids+=($!)
  done
  if [ "$DRY_RUN" = yes ]; then return; fi
  wait "${pids[@]}"
  for node in "${NODES[@]}"; do
    for ((worker = 0; worker < WORKERS; worker++)); do
      answer=$(sed -n 's/^vigor-worker //p' \
        "$SCRATCH/output/$node/$worker.log" 2> /dev/null | tail -n 1)
      ANSWERS+=("$node/$worker ${answer:-unreachable}")
      if [ -z "$answer" ]; then silent=1; fi
    done
  done
  return "$silent"
}

# show_output NODE/WORKER: the end of what a worker, or ssh itself, last said.
show_output() {
  local folder=$SCRATCH/output/${1%/*}
  tail -n 15 "$folder/${1#*/}.log" "$folder/gcloud" 2> /dev/null |
    sed 's/^/  | /' >&2
}

# upload_code: put the tree CODE into the workdir once. Workers that come after
# a preemption get the same code, whatever the local files are by then.
upload_code() {
  local target=$WORKDIR/launch/code/$CODE.tar.gz archive=$SCRATCH/$CODE.tar.gz
  if [ "$DRY_RUN" = yes ]; then archive=/tmp/$CODE.tar.gz; fi
  if [ "$DRY_RUN" != yes ] && ask gcloud storage ls "$target"; then return; fi
  if ! git -C "$ROOT" cat-file -e "$CODE" 2> /dev/null; then
    die "$BAD_ARGUMENT" "the code of this run (tree $CODE) is neither in" \
      "$target nor in $ROOT: start it again with 'up'"
  fi
  run git -C "$ROOT" archive --format=tar.gz "--output=$archive" "$CODE" &&
    run gcloud storage cp "$archive" "$target"
}
