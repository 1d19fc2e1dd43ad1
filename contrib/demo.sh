#!/usr/bin/env bash
# Shows an image volume on a real CRI-O node in a temporary directory: a pod
# reads a model from an image, the image cannot be removed meanwhile, and is let
# go afterwards. Ends clean, also when interrupted.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
dir=$(mktemp -d /tmp/ocihold-demo.XXXXXX)

say() { printf '\n\033[1m== %s\033[0m\n' "$*"; }
show() { printf '$ %s\n' "$*" && "$@"; }
# refused CMD...: runs a command that has to fail, and prints why it did.
refused() {
	printf '$ %s\n' "$*"
	if "$@" 2>"$dir/refused"; then
		echo "this should have been refused" >&2
		return 1
	fi
	grep -oE '(image used by|image is in use|rpc error).*' "$dir/refused" | tail -n 1
}
node() { "$dir/node" "$@" --dir "$dir/n"; }
finish() {
	status=$?
	if [ -x "$dir/node" ]; then
		node down || status=1
	fi
	if grep -q "$dir" /proc/self/mountinfo; then
		echo "mounts are left below $dir" >&2
		status=1
	else
		rm -rf "$dir"
	fi
	[ "$status" = 0 ] && say "The node is gone: no process, mount or file of it is left."
	exit "$status"
}
trap finish EXIT

say "Boot a node: registry, CRI-O and ocihold (the first time, CRI-O is built from its Go module: some minutes)"
CGO_ENABLED=0 go -C "$root/test" build -o "$dir/node" ./node
node up
# shellcheck disable=SC1091 # written by the node
. "$dir/n/env"
export OCIHOLD_CONFIG
ocihold() { command ocihold --config "$OCIHOLD_CONFIG" "$@"; }
show crictl version
show ocihold status

say "Push an image that holds a model"
mkdir "$dir/model"
head -c 20000000 /dev/urandom >"$dir/model/weights.bin"
echo "a model of 20 MB" >"$dir/model/README"
image=$(node push models/llama:7b --file weights.bin="$dir/model/weights.bin" --file README="$dir/model/README")
echo "$image"

say "Run a pod that asks for it"
cat >"$dir/pod.json" <<EOF
{
  "metadata": {"name": "demo", "namespace": "default", "uid": "demo-1"},
  "annotations": {
    "image-volume.ocihold.dev/container.server": "- image: $image\n  mountPath: /models\n"
  },
  "log_directory": "$dir/n/log/pods",
  "linux": {"cgroup_parent": "$CGROUP_PARENT", "security_context": {"namespace_options": {"network": 2, "pid": 1}}}
}
EOF
cat >"$dir/container.json" <<EOF
{
  "metadata": {"name": "server"},
  "image": {"image": "$BASE_IMAGE"},
  "command": ["/bin/sleep", "1000"],
  "log_path": "server.log",
  "linux": {"security_context": {"namespace_options": {"network": 2, "pid": 1}}}
}
EOF
grep -F image-volume "$dir/pod.json"
pod=$(crictl runp "$dir/pod.json")
# As kubelet does: create again while the image is on its way.
until container=$(crictl create "$pod" "$dir/container.json" "$dir/pod.json" 2>"$dir/refused"); do
	grep -oE 'image volume /models: .*will be tried again' "$dir/refused"
	sleep 0.2
done
crictl start "$container" >/dev/null

say "The container reads the model"
show crictl exec "$container" ls -l /models
show crictl exec "$container" cat /models/README
show crictl exec "$container" sha256sum /models/weights.bin
(cd "$dir/model" && show sha256sum weights.bin)
echo "$ crictl exec ... grep /models /proc/mounts"
crictl exec "$container" grep /models /proc/mounts | cut -c -160

say "One mount on the node, one lease in CRI-O's storage"
show ocihold volumes
show ocihold images

say "Nobody can remove the image now"
refused crictl rmi "$image"
refused podman --root "$CRIO_ROOT" --runroot "$CRIO_RUNROOT" rmi "$image"
show crictl exec "$container" sha256sum /models/weights.bin

say "Without ocihold, a container with the annotation does not start"
node kill ocihold
sed 's/"server"/"server", "attempt": 1/' "$dir/container.json" >"$dir/second.json"
printf '$ crictl create ... && crictl start ...\n'
ours=$IMAGE_SERVICE_ENDPOINT
export IMAGE_SERVICE_ENDPOINT=$CONTAINER_RUNTIME_ENDPOINT # crictl asks both
if second=$(crictl create "$pod" "$dir/second.json" "$dir/pod.json" 2>"$dir/refused") && crictl start "$second" 2>"$dir/refused"; then
	echo "this should have been refused" >&2
	exit 1
fi
grep -oE 'image volume /models of container.*' "$dir/refused" | head -n 1
node start ocihold
export IMAGE_SERVICE_ENDPOINT=$ours
show crictl exec "$container" cat /models/README

say "The pod goes, and the image is let go"
crictl stop --timeout 0 "$container" >/dev/null
crictl rmp -f "$pod" >/dev/null
for _ in $(seq 100); do
	ocihold images | grep models/llama | grep -q false && break
	sleep 0.1
done
show ocihold images
show crictl rmi "$image"
