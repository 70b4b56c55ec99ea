# shellcheck shell=bash
# What was asked for, kept where a lost terminal or a lost laptop cannot take
# it: one text file per name, here and in the workdir. Sourced by tpu_vm.sh.
#
# Lines "key=value", nothing quoted, nothing executed on reading: values hold
# no line break (tpu_vm.sh refuses them).

readonly RECORDS=${VIGOR_LAUNCH_DIR:-$HOME/.vigor_jax/launch}
LOCK=""

save_record() {
  local value record=$SCRATCH/record
  if [ "$DRY_RUN" = yes ]; then return; fi
  {
    printf '%s\n' "project=$PROJECT" "zone=$ZONE" "tpu=$ACCELERATOR" \
      "slices=$SLICE_COUNT" "spot=$SPOT" "runtime=$RUNTIME" \
      "workdir=$WORKDIR" "config=$CONFIG" "code=$CODE" "inputs=$INPUTS"
    for value in ${CREATE_FLAGS[@]+"${CREATE_FLAGS[@]}"}; do
      printf 'create_flag=%s\n' "$value"
    done
    for value in ${OVERRIDES[@]+"${OVERRIDES[@]}"}; do
      printf 'override=%s\n' "$value"
    done
  } > "$record"
  mkdir -p "$RECORDS"
  cp "$record" "$RECORDS/$NAME.record.new"
  mv "$RECORDS/$NAME.record.new" "$RECORDS/$NAME.record"
  if [ -z "$WORKDIR" ]; then return; fi
  if ! ask gcloud storage cp "$record" "$WORKDIR/launch/$NAME.record"; then
    explain_refusal "$ERRORS"
    die "$REFUSED" "cannot write to $WORKDIR: $ERRORS" \
      "create the bucket: gcloud storage buckets create gs://BUCKET \
--location=${ZONE%-*} --project=$PROJECT" \
      "nothing was created on the TPU side"
  fi
}

# read_record FILE: fill in what the flags left open.
read_record() {
  local line key value overrides=() create_flags=()
  while IFS= read -r line; do
    key=${line%%=*} value=${line#*=}
    case $key in
      project) PROJECT=${PROJECT:-$value} ;;
      zone) ZONE=${ZONE:-$value} ;;
      tpu) TPU=${TPU:-$value} ;;
      slices) SLICE_COUNT=${SLICE_COUNT:-$value} ;;
      spot) SPOT=${SPOT:-$value} ;;
      runtime) RUNTIME_FLAG=${RUNTIME_FLAG:-$value} ;;
      workdir) WORKDIR=${WORKDIR:-$value} ;;
      config) if [ -z "$CONFIG" ]; then CONFIG=$value; else overrides=(-); fi ;;
      code) CODE=$value ;;
      inputs) INPUTS=${INPUTS:-$value} ;;
      create_flag) create_flags+=("$value") ;;
      override) overrides+=("$value") ;;
      *) die "$BAD_ARGUMENT" "$1: unknown line '$line'" ;;
    esac
  done < "$1"
  # A command given anew replaces the recorded one as a whole.
  if [ "${#OVERRIDES[@]}" -eq 0 ] && [ "${overrides[0]:-}" != - ]; then
    OVERRIDES=(${overrides[@]+"${overrides[@]}"})
  fi
  if [ "${#CREATE_FLAGS[@]}" -eq 0 ]; then
    CREATE_FLAGS=(${create_flags[@]+"${create_flags[@]}"})
  fi
}

# recall: the record of NAME, from here or else from the workdir.
recall() {
  local record=$RECORDS/$NAME.record known=() file
  if [ ! -f "$record" ] && [ -n "$WORKDIR" ] && [ "$DRY_RUN" = no ]; then
    if ask gcloud storage cat "$WORKDIR/launch/$NAME.record"; then
      printf '%s\n' "$REPLY" > "$SCRATCH/recalled"
      record=$SCRATCH/recalled
    fi
  fi
  if [ -f "$record" ]; then read_record "$record"; return; fi
  if [ -n "$TPU" ] && [ -n "$ZONE" ]; then return; fi
  for file in "$RECORDS"/*.record; do
    if [ -f "$file" ]; then known+=("$(basename "$file" .record)"); fi
  done
  if [ "${#known[@]}" -gt 0 ]; then
    nearest "$NAME" "${known[@]}"
    die "$BAD_ARGUMENT" "nothing is recorded under --name=$NAME; nearest:" \
      "--name=$REPLY" "from another machine: add --workdir=gs://BUCKET/RUN"
  fi
  die "$BAD_ARGUMENT" "nothing is recorded under --name=$NAME" \
    "from another machine: add --workdir=gs://BUCKET/RUN"
}

# refuse_moved_record: a name that stands for a TPU elsewhere must not be taken
# over: the old one would cost money with nobody left who knows it.
refuse_moved_record() {
  local wanted="$PROJECT $ZONE $ACCELERATOR $SLICE_COUNT" old
  if [ "$DRY_RUN" = yes ] || [ ! -f "$RECORDS/$NAME.record" ]; then return; fi
  old=$(awk -F= '{ v[$1] = $2 }
    END { print v["project"], v["zone"], v["tpu"], v["slices"] }' \
    "$RECORDS/$NAME.record")
  if [ "$old" = "$wanted" ]; then return; fi
  # shellcheck disable=SC2086  # four words
  set -- $old
  if ask gcloud compute tpus queued-resources describe "$NAME" \
    "--project=$1" "--zone=$2" "--format=value(state.state)"; then
    die "$BAD_ARGUMENT" "$NAME already exists as $3 x $4 in $2 ($REPLY)" \
      "delete it first: launch/tpu_vm.sh delete --name=$NAME" \
      "or take another name: --name=$NAME-2"
  fi
}

# take_lock: two watchers of one name would undo each other's work. The lock is
# a link to the number of its owner: made, owner and all, in one step.
take_lock() {
  local lock=$RECORDS/$NAME.watcher owner tries=0
  until ln -s "$$" "$lock" 2> /dev/null; do
    owner=$(readlink "$lock")
    if [ -n "$owner" ] && kill -0 "$owner" 2> /dev/null; then
      die "$BAD_ARGUMENT" "process $owner already watches $NAME" \
        "end it first: kill $owner"
    fi
    # Its owner is gone (killed, rebooted): take over.
    rm -f "$lock"
    tries=$((tries + 1))
    if [ "$tries" -ge 10 ]; then die "$BAD_ARGUMENT" "cannot make $lock"; fi
  done
  LOCK=$lock
}

release_lock() {
  if [ -n "$LOCK" ] && [ "$(readlink "$LOCK")" = "$$" ]; then rm -f "$LOCK"; fi
}
