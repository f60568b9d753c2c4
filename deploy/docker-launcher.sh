#!/usr/bin/env bash
# Serves from a Docker image: in the spec, `engine.launcher: [/shared/docker-launcher.sh, lmsysorg/sglang:v0.5.23]` and
# `engine.python: python3` (the image's). Further words between image and interpreter are options of `docker run`.
#
# - Variables: the container gets those of the sweep and of the node, except the ones that belong to the node's own
#   programs (PATH, HOME, ...).
# - Files: the scratch folder, the probe, and each absolute path of the command that exists are mounted at the same place.
# - Processes: the container shares the node's process ids, so that telemetry and the lease see the server. It ends when
#   this client ends, however that happens: Docker then closes the container's standard input, and a watcher in the
#   container stops the server.
set -euo pipefail

[ $# -ge 2 ] || { echo "usage: docker-launcher.sh IMAGE [DOCKER-OPTION...] INTERPRETER WORD..." >&2; exit 2; }
image=$1
shift
options=(--rm --interactive --network host --ipc host --pid host)
while [[ ${1-} == -* ]]; do
  options+=("$1")
  shift
done

# CUDA_VISIBLE_DEVICES names the node's GPUs; inside the container the same GPUs count from 0.
if [[ -n ${CUDA_VISIBLE_DEVICES-} ]]; then
  options+=(--gpus "\"device=$CUDA_VISIBLE_DEVICES\"")
fi

own=" CUDA_VISIBLE_DEVICES HOME HOSTNAME LD_LIBRARY_PATH LOGNAME OLDPWD PATH PWD SHELL SHLVL TMPDIR USER VIRTUAL_ENV _ "
while IFS= read -r name; do
  [[ $own == *" $name "* ]] || options+=(--env "$name")
done < <(compgen -e)

declare -A mounted=()
mount_here() {
  [[ $1 == /* && -e $1 && -z ${mounted[$1]-} ]] || return 0
  mounted[$1]=1
  options+=(--volume "$1:$1")
}
mount_here "${SPECSWEEP_PROBE_DIR-}"
IFS=: read -ra folders <<<"${PYTHONPATH-}"
for path in "${folders[@]}" "${@:2}"; do
  mount_here "$path"
done

# shellcheck disable=SC2016  # expanded by the container's shell
serve='
exec 3<&0
"$@" </dev/null 3<&- &
server=$!
trap "kill -TERM $server" TERM INT
{ cat <&3 >/dev/null; kill -TERM $server; sleep 30; kill -KILL $server; } 2>/dev/null &
exec 3<&-
wait $server
code=$?
while kill -0 $server 2>/dev/null; do wait $server; code=$?; done
exit $code'

# Standard input stays open as long as this process (the client, after exec) lives.
exec docker run "${options[@]}" --entrypoint /bin/sh "$image" -c "$serve" server "$@" < <(exec tail --pid=$$ --follow /dev/null)
