#!/usr/bin/env bats
# The node itself: what the other files stand on.

load helpers

setup_file() {
	node_up
}

teardown_file() {
	node_down
}

setup() {
	node_env
}

teardown() {
	pods_remove
}

@test "a pod runs on every handler" {
	for POD_HANDLER in runc vm wasm; do
		pod_run "$POD_HANDLER"
		container_run "$POD_HANDLER" main
		run container_exec "$POD_HANDLER" main echo hello
		[ "$output" = hello ]
	done
}

@test "a pod gets an image as a volume" {
	pod_run pod image-volume.ocihold.dev "[{image: $BASE_IMAGE, mountPath: /vol}]"
	container_run pod main
	run container_exec pod main cat /vol/etc/group
	[ "${lines[0]}" = root:x:0: ]
}

@test "killed programs start again" {
	pod_run pod
	container_run pod main
	for program in crio ocihold registry proxy; do
		node kill "$program" --dir "$NODE_DIR"
		node start "$program" --dir "$NODE_DIR"
	done
	container_exec pod main true
	crictl pull "$BASE_IMAGE"
}

@test "the proxy spoils and counts" {
	node proxy spoil --path /manifests/ --status 404 --dir "$NODE_DIR"
	run ! crictl pull "$REGISTRY/base:1"
	node proxy clear --dir "$NODE_DIR"
	crictl pull "$REGISTRY/base:1"
	[ "$(node proxy counts --dir "$NODE_DIR" | jq '."GET /v2/base/manifests/1" > 1')" = true ]
}

@test "down leaves nothing" {
	node up --dir "$BATS_TEST_TMPDIR/other"
	NODE_DIR=$BATS_TEST_TMPDIR/other
	. "$NODE_DIR/env"
	pod_run pod
	container_run pod main
	grep -q "$NODE_DIR" /proc/self/mountinfo
	node down --dir "$NODE_DIR"
	run ! grep "$NODE_DIR" /proc/self/mountinfo
	run ! pgrep -f "$NODE_DIR"
	run find /sys/fs/cgroup -path "*${CGROUP_PARENT%/pods}*"
	[ -z "$output" ]
	node_env
}
