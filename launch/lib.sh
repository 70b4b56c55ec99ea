# shellcheck shell=bash
# Helpers of the launch scripts: messages, quoting, validation, dry runs.
# Sourced, never run. Functions that return a value set REPLY: a subshell could
# not update the state that a dry run simulates.

# Exit codes, the same for every verb (docs/tpu.md lists them).
# shellcheck disable=SC2034  # read by the scripts that source this file
readonly OK=0 TRAINING_FAILED=1 BAD_ARGUMENT=2 REFUSED=3 UNREACHABLE=4

DRY_RUN=no

say() { printf '%s\n' "$*" >&2; }

# die CODE LINE...: every line on its own, the first marked as the error.
die() {
  local code=$1 line
  shift
  say "error: $1"
  shift
  for line in "$@"; do say "  $line"; done
  exit "$code"
}

# quote ARG...: REPLY is the command line that any POSIX shell reads back as
# exactly these arguments. Single quotes only: printf %q would emit $'...',
# which is bash's alone and hard to read.
quote() {
  local arg out="" single="'" escaped="'\\''"
  for arg in "$@"; do
    case $arg in
      "" | *[!A-Za-z0-9_@%+=:,./-]*)
        out+=" '${arg//$single/$escaped}'" ;;
      *) out+=" $arg" ;;
    esac
  done
  REPLY=${out# }
}

# run COMMAND...: show the exact command, then run it; a dry run only shows it.
run() {
  quote "$@"
  if [ "$DRY_RUN" = yes ]; then
    printf '%s\n' "$REPLY"
    return 0
  fi
  say "+ $REPLY"
  "$@"
}

note() {
  if [ "$DRY_RUN" = yes ]; then printf '# %s\n' "$*"; else say "$*"; fi
}

# nearest WORD CANDIDATE...: REPLY is the candidate with the smallest edit
# distance (Levenshtein), the first one on ties.
nearest() {
  local word=$1
  shift
  REPLY=$(printf '%s\n' "$@" | awk -v a="$word" '
    function min(x, y) { return x < y ? x : y }
    function distance(b,   i, j, n, m, row, last, keep) {
      n = length(a); m = length(b)
      for (j = 0; j <= m; j++) row[j] = j
      for (i = 1; i <= n; i++) {
        last = row[0]; row[0] = i
        for (j = 1; j <= m; j++) {
          keep = row[j]
          row[j] = min(min(row[j], row[j - 1]) + 1,
                       last + (substr(a, i, 1) != substr(b, j, 1)))
          last = keep
        }
      }
      return row[m]
    }
    { d = distance($0); if (NR == 1 || d < best) { best = d; name = $0 } }
    END { print name }')
}

# one_of WHAT VALUE CANDIDATE...: die with the nearest legal value.
one_of() {
  local what=$1 value=$2 candidate
  shift 2
  for candidate in "$@"; do
    if [ "$value" = "$candidate" ]; then return 0; fi
  done
  nearest "$value" "$@"
  die "$BAD_ARGUMENT" "$what '$value' does not exist; nearest: '$REPLY'" \
    "legal: $*"
}

# whole FLAG VALUE MINIMUM: die unless VALUE is a whole number >= MINIMUM.
whole() {
  case $2 in
    "" | *[!0-9]* | ??????????*)
      die "$BAD_ARGUMENT" "$1='$2' is not a whole number; nearest: $1=$3" ;;
  esac
  if [ "$2" -lt "$3" ]; then
    die "$BAD_ARGUMENT" "$1='$2' is too small; nearest: $1=$3"
  fi
}

seconds() {
  case $2 in
    "" | . | *[!0-9.]* | *.*.*)
      die "$BAD_ARGUMENT" "$1='$2' is not a number of seconds; nearest:" \
        "$1=30" ;;
  esac
}

# A newline inside an argument cannot survive the one-per-line files in which a
# command is recorded, so it is refused rather than mangled.
one_line() {
  case $2 in
    *$'\n'*) die "$BAD_ARGUMENT" "$1 holds a line break; write it on one line"
  esac
}

# existing_config PATH ROOT: die with the nearest file of configs/.
existing_config() {
  local path=$1 root=$2 file found=()
  # ml_collections configs take an argument after a colon: file.py:argument.
  file=${path%%:*}
  if [ -z "$file" ]; then
    die "$BAD_ARGUMENT" "--config is missing" \
      "for example: --config=configs/qwen2p5_3b_math.py"
  fi
  if [ -f "$root/$file" ] && [ "${file%.py}" != "$file" ]; then return 0; fi
  while IFS= read -r file; do
    found+=("${file#"$root/"}")
  done < <(find "$root/configs" -maxdepth 1 -name '*.py' | sort)
  if [ "${#found[@]}" -eq 0 ]; then
    die "$BAD_ARGUMENT" "--config='$path' does not exist (no configs/*.py)"
  fi
  nearest "$path" "${found[@]}"
  die "$BAD_ARGUMENT" "--config='$path' does not exist; nearest: '$REPLY'" \
    "paths are relative to the repository, whose files go to the workers"
}
