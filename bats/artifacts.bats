#!/usr/bin/env bats
# OCI artifacts as images, by command line.

load helpers

setup_file() {
	node_up
	node_env
	head -c 300000 /dev/urandom >"$BATS_FILE_TMPDIR/weights"
	echo '{"a":1}' >"$BATS_FILE_TMPDIR/config"
	MODEL=$(node push models/tiny:1 --artifact --dir "$NODE_DIR" \
		--file "config.json=$BATS_FILE_TMPDIR/config" --file "weights/1.bin=$BATS_FILE_TMPDIR/weights")
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

@test "an artifact is pulled, listed, inspected and removed as an image is" {
	run -0 --separate-stderr ocihold pull "$MODEL"
	id=$output
	[[ $stderr == *"$MODEL: 100% of "* ]]
	run -0 ocihold images
	[[ $output == *"models/tiny"* ]]
	[ "$(crictl inspecti -o json "$MODEL" | jq -r .status.id)" = "$id" ]
	[ "$(crictl inspecti -o json "$MODEL" | jq -r '.info.labels["ocihold.dev/artifact-type"]')" = application/vnd.test ]
	digest=$(podman image inspect "$id" | jq -r '.[0].Labels["ocihold.dev/artifact"]')
	[ "$(crictl inspecti -o json "${MODEL%:*}@$digest" | jq -r .status.id)" = "$id" ]
	run -0 ocihold rmi "$MODEL"
	run ! crictl inspecti "$MODEL"
}

@test "an artifact is a volume, file by file" {
	pod_run model image-volume.ocihold.dev "[{image: $MODEL, mountPath: /model}]"
	container_run model main
	container_exec model main cat /model/config.json | cmp - "$BATS_FILE_TMPDIR/config"
	container_exec model main cat /model/weights/1.bin | cmp - "$BATS_FILE_TMPDIR/weights"
}

@test "an artifact whose titles lead out is refused by name" {
	bad=$(node push models/bad:1 --artifact --dir "$NODE_DIR" --file "../../etc/passwd=$BATS_FILE_TMPDIR/config")
	run ! ocihold pull "$bad"
	[[ $output == *'invalid OCI artifact: its title "../../etc/passwd" has ".." in it'* ]]
}
