# Helpers of the end-to-end tests: a real node, and pods on it by crictl.
#
# A test file boots its node once:
#
#	setup_file()    { node_up; }
#	teardown_file() { node_down; }
#	setup()         { node_env; }
#
# and runs pods, each known by its name, which are all removed by pods_remove.

bats_require_minimum_version 1.5.0

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# node runs the program of test/node, built once per run of bats.
node() {
	local program=$BATS_RUN_TMPDIR/node
	[ -x "$program" ] || go -C "$ROOT/test" build -o "$program" ./node || return
	"$program" "$@"
}

# node_up boots the file's node; arguments are flags of "node up".
node_up() {
	node up --dir "$BATS_FILE_TMPDIR/n" "$@"
}

# node_env sets the environment for commands against the file's node.
node_env() {
	# shellcheck disable=SC1091 # written by node_up
	. "$BATS_FILE_TMPDIR/n/env"
}

# ocihold runs the product's command line against the file's node.
ocihold() {
	command ocihold --config "$OCIHOLD_CONFIG" "$@"
}

# node_down ends the file's node. On failure its logs are kept in the output.
node_down() {
	node down --dir "$BATS_FILE_TMPDIR/n" || {
		tail -n 40 "$BATS_FILE_TMPDIR"/n/log/*.log
		return 1
	}
}

# retry SECONDS COMMAND... repeats a command until it succeeds.
retry() {
	local end=$((SECONDS + $1))
	shift
	until "$@"; do
		[ "$SECONDS" -lt "$end" ] || return 1
		sleep 0.1
	done
}

# pod_run NAME [ANNOTATION VALUE]... runs a pod sandbox. POD_HANDLER names its
# runtime handler.
pod_run() {
	local name=$1 annotations='{}'
	shift
	while [ $# -gt 0 ]; do
		annotations=$(jq -n --argjson a "$annotations" --arg k "$1" --arg v "$2" '$a + {($k): $v}')
		shift 2
	done
	jq -n --arg name "$name" --argjson annotations "$annotations" '{
		metadata: {name: $name, namespace: "default", uid: $name},
		annotations: $annotations,
		log_directory: (env.NODE_DIR + "/log/pods/" + $name),
		linux: {
			cgroup_parent: (env.CGROUP_PARENT + "/" + $name),
			security_context: {namespace_options: {network: 2, pid: 1}}
		}
	}' >"$BATS_TEST_TMPDIR/$name.pod.json"
	crictl runp ${POD_HANDLER:+--runtime "$POD_HANDLER"} "$BATS_TEST_TMPDIR/$name.pod.json" >"$BATS_TEST_TMPDIR/$name.pod"
}

# container_create POD NAME [COMMAND...] creates a container in a pod that
# pod_run has run; by default it sleeps.
container_create() {
	local pod=$1 name=$2
	shift 2
	[ $# -gt 0 ] || set -- /bin/sleep 1000000
	jq -n --arg name "$name" '{
		metadata: {name: $name},
		image: {image: env.BASE_IMAGE, user_specified_image: env.BASE_IMAGE},
		command: $ARGS.positional,
		log_path: ($name + ".log"),
		labels: {"io.kubernetes.container.name": $name},
		linux: {security_context: {namespace_options: {network: 2, pid: 1}}}
	}' --args -- "$@" >"$BATS_TEST_TMPDIR/$pod.$name.json"
	crictl create "$(cat "$BATS_TEST_TMPDIR/$pod.pod")" "$BATS_TEST_TMPDIR/$pod.$name.json" \
		"$BATS_TEST_TMPDIR/$pod.pod.json" >"$BATS_TEST_TMPDIR/$pod.$name"
}

# container_start POD NAME starts a container.
container_start() {
	crictl start "$(container_id "$1" "$2")" >/dev/null
}

# container_run POD NAME [COMMAND...] creates and starts a container. A create
# that is refused is repeated, as kubelet does, for 30 s.
container_run() {
	retry 30 container_create "$@" && container_start "$1" "$2"
}

# container_id POD NAME prints CRI-O's id of a container.
container_id() {
	cat "$BATS_TEST_TMPDIR/$1.$2"
}

# container_exec POD NAME COMMAND... runs a command in a container.
container_exec() {
	local id
	id=$(container_id "$1" "$2")
	shift 2
	crictl exec "$id" "$@"
}

# pods_remove removes every pod of the node, containers first and without grace:
# CRI-O would give them as long as crictl's own time-out.
pods_remove() {
	local ids
	ids=$(crictl ps -q)
	# shellcheck disable=SC2086 # a list of words
	[ -z "$ids" ] || crictl stop -t 0 $ids >/dev/null
	ids=$(crictl pods -q)
	# shellcheck disable=SC2086 # a list of words
	[ -z "$ids" ] || crictl rmp -f $ids >/dev/null
}
