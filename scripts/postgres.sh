#!/bin/sh
# Installs PostgreSQL's server programs for the tests, which start a server of their own with them. As root on Debian
# and Ubuntu only; anywhere else, and when it fails, it says so and the tests that need a server skip.
set -u
if command -v initdb >/dev/null 2>&1 || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1; then
  exit 0
fi
told() {
  echo "PostgreSQL: $1; the tests at a real PostgreSQL server will skip." >&2
  exit 0
}
[ "$(id -u)" = 0 ] || told "not installed, and only root can install it"
command -v apt-get >/dev/null 2>&1 || told "not installed, and there is no apt-get (install a package with initdb)"
export DEBIAN_FRONTEND=noninteractive
# A mirror that does not answer must not hold up the tests, nor a lock of dpkg that somebody else has.
get="timeout --kill-after=10 300 apt-get -y -qq -o Acquire::http::Timeout=30 -o Acquire::Retries=2 -o DPkg::Lock::Timeout=60"
echo "Installing PostgreSQL's server for the tests ..."
log=$(mktemp)
# First what the server's package reads when it is set up: no cluster of the machine's own.
{ $get update && $get install --no-install-recommends postgresql-common; } >"$log" 2>&1 ||
  told "apt-get could not install it ($(tail -n 1 "$log"))"
conf=/etc/postgresql-common/createcluster.conf
if grep -q '^#* *create_main_cluster' "$conf" 2>/dev/null; then
  sed -i 's/^#* *create_main_cluster.*/create_main_cluster = false/' "$conf"
else
  echo "create_main_cluster = false" >>"$conf"
fi
$get install --no-install-recommends postgresql >"$log" 2>&1 || told "apt-get could not install it ($(tail -n 1 "$log"))"
rm -f "$log"
