#!/usr/bin/env bats
# Images from files, for nodes without a registry.

load helpers

setup_file() {
	node_up --handler-roots
	node_env
	IMAGE=$(node push some/tool:1 --dir "$NODE_DIR" --file /bin/sleep=/bin/busybox)
	export IMAGE ARCHIVES=$BATS_FILE_TMPDIR/archives
	mkdir "$ARCHIVES"
	skopeo --insecure-policy copy -q --src-tls-verify=false "docker://$IMAGE" "docker-archive:$ARCHIVES/docker.tar:reg.example/tool:docker"
	skopeo --insecure-policy copy -q --src-tls-verify=false "docker://$IMAGE" "oci-archive:$ARCHIVES/oci.tar:reg.example/tool:oci"
	skopeo --insecure-policy copy -q --src-tls-verify=false "docker://$IMAGE" "oci:$ARCHIVES/layout:reg.example/tool:layout"
}

teardown_file() {
	node_down
}

setup() {
	node_env
	VM_ROOT=$NODE_DIR/lib/handlers/vm
}

teardown() {
	pods_remove
	ocihold rmi reg.example/tool:docker || true
}

@test "import puts an image from a file into the handler's root, and a pod runs from it" {
	cd "$ARCHIVES"
	run -0 --separate-stderr ocihold import --handler vm docker.tar
	id=$output
	[[ $id =~ ^[0-9a-f]{64}$ ]]
	[[ $stderr == *"docker.tar: 100% of "* ]]
	[ "$(ocihold images -o json | jq -r --arg id "$id" '.images[] | select(.id == $id) | .handlers[]')" = vm ]
	run -0 grep -c "$id" "$VM_ROOT/overlay-images/images.json"

	POD_HANDLER=vm pod_run p
	BASE_IMAGE=reg.example/tool:docker container_create p c
	container_start p c
	run -0 grep -F "$VM_ROOT/overlay" "/proc/$(crictl inspect -o go-template --template '{{.info.pid}}' "$(container_id p c)")/mountinfo"
	run ! ocihold rmi "$id"
	[[ $output == *"in use"* ]]
}

@test "the kinds of archives are told apart, and give the same image" {
	for from in oci.tar layout docker.tar; do
		run -0 --separate-stderr ocihold import --handler vm "$ARCHIVES/$from"
		id=${id:-$output}
		[ "$output" = "$id" ] || [ "$from" = docker.tar ] # which has the layers uncompressed and a config of its own
	done
	run -0 ocihold import -o json --handler vm --name reg.example/tool:new "oci:$ARCHIVES/layout"
	[[ $output == *'"reg.example/tool:new"'* ]]
}

@test "import works without the daemon" {
	node kill ocihold --dir "$NODE_DIR"
	run -0 ocihold import --handler vm "$ARCHIVES/docker.tar"
	run -0 ocihold images
	[[ $output == *"reg.example/tool:docker"* ]]
	node start ocihold --dir "$NODE_DIR"
	retry 10 ocihold status
}

@test "import says what failed, and leaves no image" {
	before=$(ocihold images -o json | jq -r '.images[].id' | sort)
	head -c 1500 "$ARCHIVES/oci.tar" >"$BATS_TEST_TMPDIR/cut.tar"
	run ! ocihold import --handler vm "$BATS_TEST_TMPDIR/cut.tar"
	[[ $output == *"import $BATS_TEST_TMPDIR/cut.tar: "* ]]
	run ! ocihold import --handler vm "$BATS_TEST_TMPDIR/none.tar"
	[[ $output == *"no such file"* ]]
	run ! ocihold import --handler none "$ARCHIVES/oci.tar"
	[[ $output == *'"none" is not known'* ]]
	[ "$(ocihold images -o json | jq -r '.images[].id' | sort)" = "$before" ]
}
