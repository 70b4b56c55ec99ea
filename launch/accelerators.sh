# shellcheck shell=bash
# Names of TPU slices: what Google Cloud calls a slice (accelerator type), what
# preflight calls it (family:topology), and the image its VMs boot.
# Sourced by tpu_vm.sh. Source: cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e}.

# type topology, one slice per line. v5e and v6e count chips; v4 and v5p count
# TensorCores, two to a chip. Which of them a zone offers changes: ask
# `gcloud compute tpus accelerator-types list --zone=ZONE`.
readonly SLICES="
v5litepod-1 v5e:1x1
v5litepod-4 v5e:2x2
v5litepod-8 v5e:2x4
v5litepod-16 v5e:4x4
v5litepod-32 v5e:4x8
v5litepod-64 v5e:8x8
v5litepod-128 v5e:8x16
v5litepod-256 v5e:16x16
v6e-1 v6e:1x1
v6e-4 v6e:2x2
v6e-8 v6e:2x4
v6e-16 v6e:4x4
v6e-32 v6e:4x8
v6e-64 v6e:8x8
v6e-128 v6e:8x16
v6e-256 v6e:16x16
v5p-8 v5p:2x2x1
v5p-16 v5p:2x2x2
v5p-32 v5p:2x2x4
v5p-64 v5p:2x4x4
v5p-128 v5p:4x4x4
v5p-256 v5p:4x4x8
v5p-512 v5p:4x8x8
v4-8 v4:2x2x1
v4-16 v4:2x2x2
v4-32 v4:2x2x4
v4-64 v4:2x4x4
v4-128 v4:4x4x4
"

# resolve_slice NAME: sets ACCELERATOR, TOPOLOGY, CHIPS, VMS and RUNTIME from an
# accelerator type, its short form (v5e-16) or a topology (v5e:4x4).
# The names are read by the script that sources this file.
# shellcheck disable=SC2034
resolve_slice() {
  local name=$1 type topology known=()
  case $name in
    "") die "$BAD_ARGUMENT" "--tpu is missing" \
          "for example: --tpu=v5e:4x4 (the same slice as v5litepod-16)" ;;
    tpu7x* | v7x*) die "$BAD_ARGUMENT" \
          "--tpu='$name' is not offered as a TPU VM, only through GKE" \
          "nearest: --tpu=v6e:4x4" ;;
    v5e-*) name=v5litepod-${name#v5e-} ;;
  esac
  ACCELERATOR=""
  while read -r type topology; do
    if [ -z "$type" ]; then continue; fi
    known+=("$type" "$topology")
    if [ "$name" = "$type" ] || [ "$name" = "$topology" ]; then
      ACCELERATOR=$type TOPOLOGY=$topology
    fi
  done <<< "$SLICES"
  if [ -z "$ACCELERATOR" ]; then one_of --tpu "$name" "${known[@]}"; fi
  CHIPS=${TOPOLOGY#*:}
  CHIPS=$((${CHIPS//x/*}))
  # Four chips a VM, but for v5e and v6e slices of up to eight: one VM. Only for
  # dry runs; of a slice that exists, Google Cloud says how many VMs it has.
  VMS=$((CHIPS < 4 ? 1 : CHIPS / 4))
  case $ACCELERATOR in
    v5litepod-8 | v6e-8) VMS=1 ;;
  esac
  case $ACCELERATOR in
    v5litepod-*) RUNTIME=v2-alpha-tpuv5-lite ;;
    v6e-*) RUNTIME=v2-alpha-tpuv6e ;;
    v5p-*) RUNTIME=v2-alpha-tpuv5 ;;
    v4-*) RUNTIME=tpu-ubuntu2204-base ;;
  esac
}
