#!/usr/bin/env bats
# Image volumes, as an operator sees them.

load helpers

readonly key=image-volume.ocihold.dev

setup_file() {
	node_up
	node_env
	echo "a model" >"$BATS_FILE_TMPDIR/model"
	printf '#!/bin/sh\necho it runs\n' >"$BATS_FILE_TMPDIR/tool"
	chmod 755 "$BATS_FILE_TMPDIR/tool"
	MODEL=$(node push models/small:1 --dir "$NODE_DIR" --file "weights/model=$BATS_FILE_TMPDIR/model" --file "tool=$BATS_FILE_TMPDIR/tool")
	export MODEL
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

# leased succeeds if the image is leased.
leased() {
	ocihold images | grep -F "$MODEL" | grep -q true
}

released() {
	ocihold images | grep -F "$MODEL" | grep -q false
}

@test "a container reads its volume, and nothing can be written" {
	pod_run p "$key/container.c" "- {image: $MODEL, mountPath: /models}"
	container_run p c
	run -0 container_exec p c cat /models/weights/model
	[ "$output" = "a model" ]
	run -0 container_exec p c grep ' /models ' /proc/mounts
	[[ $output == *" overlay ro,nosuid,nodev,noexec,"* ]]
	run ! container_exec p c touch /models/new
	run ! container_exec p c /models/tool
}

@test "readOnly: false takes what is written, as long as the container or the pod" {
	pod_run p "$key/container.c" "- {image: $MODEL, mountPath: /models, readOnly: false, scratchSize: 64MiB}" \
		"$key/container.d" "- {image: $MODEL, mountPath: /models, readOnly: false, scratch: pod}"
	container_run p c
	container_run p d
	run -0 container_exec p c sh -c 'echo mine >/models/weights/model; cat /models/weights/model'
	[ "$output" = "mine" ]
	run -0 container_exec p d cat /models/weights/model
	[ "$output" = "a model" ]
	run -0 ocihold volumes
	[[ ${lines[1]} == *" 64MiB, container" ]]
	[[ ${lines[2]} == *" 1GiB, pod" ]]
	run -0 ocihold df
	[[ ${lines[-2]} =~ ^SCRATCH\ +VOLUMES\ +SIZE\ +AT\ MOST$ ]]
	[[ ${lines[-1]} =~ ^/.*/scratch\ +2\  ]]
	run -0 ocihold check
	[[ $output =~ writable\ volumes\ +ok ]]
}

@test "exec: true lets programs run" {
	pod_run p "$key" "[{\"image\": \"$MODEL\", \"mountPath\": \"/models\", \"exec\": true}]"
	container_run p c
	run -0 container_exec p c /models/tool
	[ "$output" = "it runs" ]
}

@test "only the most specific annotation counts" {
	pod_run p "$key/container.c" "- {image: $MODEL, mountPath: /own}" "$key/pod" "- {image: $MODEL, mountPath: /all}" \
		"$key/container.none" "[]"
	container_run p c
	container_run p d
	container_run p none
	run -0 container_exec p c ls /own
	run ! container_exec p c ls /all
	run -0 container_exec p d ls /all
	run ! container_exec p none ls /all
}

@test "ocihold volumes and the container's annotation say what was given" {
	pod_run p "$key" "- {image: $MODEL, mountPath: /models}"
	container_run p c
	run -0 ocihold volumes
	[[ ${lines[0]} =~ ^NAMESPACE\ +POD\ +CONTAINER\ +PATH\ +IMAGE\ +IMAGE\ ID\ +DIGEST\ +WRITABLE$ ]]
	[[ ${lines[1]} =~ ^default\ +p\ +c\ +/models\ +$MODEL\ +[0-9a-f]{12}\ +sha256:[0-9a-f]{64}\ +-$ ]]
	id=$(ocihold volumes -o json | jq -r '.[0].imageID')
	run -0 crictl inspect -o go-template --template '{{index .info.runtimeSpec.annotations "ocihold.dev/volumes"}}' "$(container_id p c)"
	[ "$(jq -r '.[0] | .mountPath + " " + .imageID' <<<"$output")" = "/models $id" ]
}

@test "an image in use is refused to everybody, and let go with the pod" {
	pod_run p "$key" "- {image: $MODEL, mountPath: /models}"
	container_run p c
	leased
	run ! crictl rmi "$MODEL"
	[[ $output == *"in use"* ]]
	run ! podman --root "$CRIO_ROOT" --runroot "$CRIO_RUNROOT" rmi "$MODEL"
	run -0 container_exec p c cat /models/weights/model
	pods_remove
	retry 10 released
	[ -z "$(ocihold volumes -o json | jq -r '.[]')" ]
	run -0 crictl rmi "$MODEL"
}

@test "a bad annotation refuses its container with one line, and no other" {
	pod_run p "$key/container.bad" "- {image: $MODEL, mountpath: /models}" "$key/container.good" "- {image: $MODEL, mountPath: /models}"
	run ! container_create p bad
	[[ $output == *"container bad of pod default/p: annotation $key/container.bad: "*mountpath*mountPath* ]]
	container_run p good
}

@test "without ocihold no container starts bare, and all others do" {
	pod_run p "$key" "- {image: $MODEL, mountPath: /models}"
	container_run p before
	pod_run plain
	# crictl connects to both endpoints, whatever it is to do.
	export IMAGE_SERVICE_ENDPOINT="$CONTAINER_RUNTIME_ENDPOINT"
	node kill ocihold --dir "$NODE_DIR"
	run ! ocihold status
	run ! container_run_once p c
	[[ $output == *"image volume /models of container c of pod default/p: requested by annotation"*"not injected"* ]]
	container_run plain c
	run -0 container_exec p before cat /models/weights/model
	node start ocihold --dir "$NODE_DIR"
	run -0 ocihold status
	container_run p d
	run -0 container_exec p d cat /models/weights/model
}

container_run_once() {
	container_create "$@" && container_start "$1" "$2"
}
