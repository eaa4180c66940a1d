#!/usr/bin/env bash
# Brings a checkout to life: `bootstrap.sh venv` makes .venv, `bootstrap.sh system` installs what the lab needs,
# `bootstrap.sh faults` what `make faults` needs beside it, `bootstrap.sh browser` the one that the plan's page is looked at
# in, `bootstrap.sh rpm` what a bundle of RPM packages is tested with.
# Packages are named before they are installed, and only those are installed that are missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '%s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# A program, and the Debian package that has it; nft is what a test of the checks blocks ports with.
LAB_PROGRAMS=(
  systemd-nspawn=systemd-container
  mmdebstrap=mmdebstrap
  ssh=openssh-client
  ip=iproute2
  rsync=rsync
  iperf3=iperf3
  nft=nftables
)

# What makes, signs, indexes and fetches RPM packages.
RPM_PROGRAMS=(
  dnf=dnf
  rpmbuild=rpm
  createrepo_c=createrepo-c
  gpg=gnupg
)

# Debian keeps some of them out of an ordinary user's PATH.
PATH="$PATH:/usr/sbin:/sbin"

# install_packages WHAT PACKAGE...: WHAT is what they are for, as an error or a progress line names it.
install_packages() {
  local what=$1
  shift
  local -a install=(apt-get install -qq -y --no-install-recommends "$@")
  command -v apt-get > /dev/null ||
    die "$what missing, in Debian and Ubuntu the packages $*: install them with this system's package manager"
  [ "$(id -u)" -eq 0 ] || die "$what missing: run \`sudo apt-get install $*\`"
  say "installing $what: $*"
  export DEBIAN_FRONTEND=noninteractive
  # The package lists may be absent or old: they are fetched when the first try fails.
  if ! "${install[@]}" < /dev/null > /dev/null 2>&1; then
    apt-get update -qq < /dev/null
    "${install[@]}" < /dev/null > /dev/null
  fi
}

# install_missing WHAT PROGRAM=PACKAGE...: those whose program is not there.
install_missing() {
  local what=$1 pair missing=()
  shift
  for pair in "$@"; do
    command -v "${pair%%=*}" > /dev/null || missing+=("${pair#*=}")
  done
  [ ${#missing[@]} -eq 0 ] || install_packages "$what" "${missing[@]}"
}

system_packages() {
  install_missing "programs that the lab needs" "${LAB_PROGRAMS[@]}"
}

rpm_packages() {
  install_missing "programs that bundles of RPM packages are tested with" "${RPM_PROGRAMS[@]}"
}

# A step of the wall clock is made by this library; it is no program, so it is looked for where Debian puts it.
faults_packages() {
  system_packages
  compgen -G "/usr/lib/*/faketime/libfaketime.so.1" > /dev/null ||
    install_packages "a library that fakes the time" libfaketime
}

browser_packages() {
  command -v chromium > /dev/null || command -v chromium-browser > /dev/null || command -v google-chrome > /dev/null ||
    install_packages "a browser to look at the plan's page in" chromium
}

# A Python is good enough when it is new enough; `ensurepip` is a package of its own in Debian.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then
      say "$candidate"
      return
    fi
  done
  die "no Python 3.11 or newer found: install one, or name it: make PYTHON=/path/to/python3"
}

virtual_environment() {
  local python version started=$SECONDS
  python=$(find_python)
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  if ! "$python" -c 'import ensurepip' 2> /dev/null; then
    install_packages "Python's ensurepip" "python$version-venv"
  fi
  # One that is broken, or of a Python that is gone, is made anew.
  .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null || rm -rf .venv
  [ -d .venv ] || "$python" -m venv .venv
  say "virtual environment: .venv with Python $version (the first time takes a minute)"
  # Errors are printed, remarks on caches and mirrors not. Byte code is made on all cores at once, and here: where the
  # environment says PYTHONDONTWRITEBYTECODE, each later start of a program would compile all that it imports.
  # What does not compile (packages bring templates and files of other Pythons) is told where it is imported, if ever.
  .venv/bin/python -m pip install -qq --no-compile --disable-pip-version-check --no-input \
    --editable '.[test]' --constraint constraints.txt
  .venv/bin/python -m compileall -q -j 0 .venv/lib > /dev/null || true
  # What `make` compares with pyproject.toml and constraints.txt.
  touch .venv/.made
  say "virtual environment: ready after $((SECONDS - started)) s"
}

case ${1:-} in
  venv) virtual_environment ;;
  system) system_packages ;;
  faults) faults_packages ;;
  browser) browser_packages ;;
  rpm) rpm_packages ;;
  *) die "usage: scripts/bootstrap.sh venv | system | faults | browser | rpm" ;;
esac
