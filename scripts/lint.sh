#!/usr/bin/env bash
# Every static check, side by side, each with its time; all of them run, then the failed ones are named.
# With arguments (names of checks below) only those run: scripts/lint.sh mypy ruff
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
export PATH="$PWD/.venv/bin:$PATH"
# The default inventory of ansible.cfg is yours and may not exist yet; without this ansible-lint would quietly leave
# out the playbooks.
export ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED=false

shell_scripts() {
  git ls-files --cached --others --exclude-standard | while IFS= read -r file; do
    [ -f "$file" ] || continue
    case ${file##*/} in
      *.sh) printf '%s\0' "$file" ;;
      *.*) ;;
      *) if head -n 1 -- "$file" | grep -aqE '^#!.*\b(ba|da)?sh\b'; then printf '%s\0' "$file"; fi ;;
    esac
  done
}

check_ruff() { ruff check --quiet --output-format concise .; }
check_format() { ruff format --quiet --check --output-format concise . || { echo 'lay it out with: make format'; return 1; }; }
# The handoff plugin is a package of its own, with settings of its own.
check_mypy() { mypy --no-error-summary && (cd ppdeploy_handoff && mypy --no-error-summary); }
check_yamllint() { yamllint --strict .; }
check_shellcheck() { shell_scripts | xargs --null --no-run-if-empty shellcheck; }
# Strict: it reports a playbook that does not even parse as a mere warning.
check_ansible() { ansible-lint -q --nocolor --strict; }

timed() {
  local started=$EPOCHREALTIME outcome=ok status=0
  "check_$1" || { outcome=FAILED; status=1; }
  local ended=$EPOCHREALTIME
  # EPOCHREALTIME has a dot or, in some locales, a comma before its six decimals.
  printf 'lint: %-10s %-6s %6d ms\n' "$1" "$outcome" $(((${ended/[.,]/} - ${started/[.,]/}) / 1000))
  return "$status"
}

[ $# -gt 0 ] || set -- ansible mypy ruff format yamllint shellcheck
output=$(mktemp -d)
trap 'rm -rf "$output"' EXIT
declare -A job=()
for name; do
  timed "$name" > "$output/$name" 2>&1 < /dev/null &
  job[$name]=$!
done
failed=()
for name; do
  wait "${job[$name]}" || failed+=("$name")
  cat "$output/$name"
done
[ ${#failed[@]} -eq 0 ] || { printf 'lint: failed: %s\n' "${failed[*]}" >&2; exit 1; }
