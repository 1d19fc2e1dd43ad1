#!/usr/bin/env bats
# Setting a node up with handlers, and finding out what is wrong with one.

load helpers

setup_file() {
	node_up --handler-roots
	node_env
	IMAGE=$(node push some/tool:1 --dir "$NODE_DIR" --file /bin/sleep=/bin/busybox)
	export IMAGE
}

teardown_file() {
	node_down
}

setup() {
	node_env
	CRIO_ETC=$NODE_DIR/etc/crio
	DROP_IN=$CRIO_ETC/crio.conf.d/90-ocihold.conf
	VM_ROOT=$NODE_DIR/lib/handlers/vm
}

# restart PROGRAM... ends programs of the node and starts them again.
restart() {
	local program
	for program; do
		node kill "$program" --dir "$NODE_DIR" --signal 15
		node start "$program" --dir "$NODE_DIR"
	done
}

# found CHECK prints what a check came to, and succeeds if that is a failure.
found() {
	ocihold check -o json 2>/dev/null | jq -er --arg check "$1" '.[] | select(.check == $check and .result == "failed") | "\(.detail) FIX \(.fix)"'
}

@test "a node that was set up passes, and is set up only once" {
	run -0 ocihold check
	[[ $output != *failed* ]]
	run -0 ocihold config crio --write
	[[ $output == *"is up to date"*"CRI-O runs with it"* ]]
	run -0 cmp "$DROP_IN" <(ocihold config crio)
	run -0 ocihold config hook --write
	[[ $output == *"is up to date"* ]]
	[ "$(find "$CRIO_ETC" -name '.ocihold-*')" = "" ]
}

@test "a root whose disk is not mounted is named, and not made anew" {
	mv "$VM_ROOT/.ocihold-root" "$BATS_TEST_TMPDIR"
	run -0 found "root of vm"
	[[ $output == *"$VM_ROOT"*"FIX mount its disk"* ]]
	run ! ocihold config crio --write
	[[ $output == *"$VM_ROOT"*"echo vm > $VM_ROOT/.ocihold-root"* ]]
	[ ! -e "$VM_ROOT/.ocihold-root" ]
	mv "$BATS_TEST_TMPDIR/.ocihold-root" "$VM_ROOT"
	run -0 ocihold check
}

@test "a root that is another directory for CRI-O is named" {
	unshare --mount --propagation private sh -c "mkdir -p '$BATS_TEST_TMPDIR/other' && echo vm >'$BATS_TEST_TMPDIR/other/.ocihold-root' &&
		mount --bind '$BATS_TEST_TMPDIR/other' '$VM_ROOT' && ! ocihold --config '$OCIHOLD_CONFIG' check" >"$BATS_TEST_TMPDIR/out" 2>&1
	run -0 grep -F "sees another directory at $VM_ROOT" "$BATS_TEST_TMPDIR/out"
}

@test "a later file of CRI-O's is found, in the files and in the running CRI-O" {
	printf '[crio]\ninternal_repair = true\n' >"$CRIO_ETC/crio.conf.d/99-later"
	run -0 found drop-in
	[[ $output == *"a file that is read after $DROP_IN overrides it: internal_repair is on"* ]]
	run ! found CRI-O
	run ! ocihold config crio --write
	[[ $output == *"give it a name that comes last"*"internal_repair is on"* ]]
	restart crio
	run -0 found CRI-O
	[[ $output == *"it runs with other settings: internal_repair is on"* ]]
	rm "$CRIO_ETC/crio.conf.d/99-later"
	run -0 found CRI-O
	[[ $output == *"FIX systemctl restart crio" ]]
	run -0 ocihold config crio --write
	[[ $output == *"Restart CRI-O"* ]]
	restart crio
	retry 30 ocihold check
}

@test "an absent drop-in, one that is old, and one too many" {
	mv "$DROP_IN" "$BATS_TEST_TMPDIR/drop-in"
	run -0 found drop-in
	[[ $output == *"the root of handler vm, $VM_ROOT, is no additional image store"*"FIX ocihold config crio --write"* ]]
	echo '# somebody else' >"$DROP_IN"
	run ! ocihold config crio --write
	[[ $output == *"$DROP_IN is not by ocihold"* ]]
	cp "$BATS_TEST_TMPDIR/drop-in" "$DROP_IN"
	echo '# changed' >>"$DROP_IN"
	run -0 found drop-in
	[[ $output == *"is not as ocihold's and CRI-O's configuration would have it now"* ]]
	cp "$BATS_TEST_TMPDIR/drop-in" "$CRIO_ETC/crio.conf.d/91-again"
	run -0 found drop-in
	[[ $output == *"there are several by ocihold"* ]]
	run ! ocihold config crio --write
	[[ $output == *"91-again is a drop-in of ocihold's too"* ]]
	rm "$CRIO_ETC/crio.conf.d/91-again"
	run -0 ocihold config crio --write
	[[ $output == "Wrote $DROP_IN."* ]]
	cmp "$DROP_IN" "$BATS_TEST_TMPDIR/drop-in"
	run -0 ocihold check
}

@test "files in places that nobody reads" {
	mkdir "$CRIO_ETC/conf.d"
	touch "$CRIO_ETC/conf.d/10-mine.conf"
	run -0 found "misplaced files"
	[[ $output == *"CRI-O does not read $CRIO_ETC/conf.d, where 10-mine.conf is"* ]]
	rm -r "$CRIO_ETC/conf.d"
	touch "$OCIHOLD_CONFIG.d/mine.conf" "$CRIO_ETC/crio.conf.d/10-old.bak"
	run -0 ocihold check
	[[ $output == *"ocihold does not read $OCIHOLD_CONFIG.d/mine.conf"* ]]
	[[ $output == *"CRI-O reads $CRIO_ETC/crio.conf.d/10-old.bak like any other file"* ]]
	rm "$OCIHOLD_CONFIG.d/mine.conf" "$CRIO_ETC/crio.conf.d/10-old.bak"
}

@test "CRI-O down, ocihold down" {
	node kill crio --dir "$NODE_DIR"
	run -0 found CRI-O
	[[ $output == *"$NODE_DIR/run/crio.sock"*"FIX systemctl start crio"* ]]
	run -0 ocihold config crio --write
	[[ $output == *"CRI-O does not answer. Start it"* ]]
	node start crio --dir "$NODE_DIR"
	node kill ocihold --dir "$NODE_DIR"
	run -0 found daemon
	[[ $output == *"FIX systemctl enable --now ocihold" ]]
	run -0 found "image service"
	node start ocihold --dir "$NODE_DIR"
	retry 30 ocihold check
}

@test "kubelet must ask ocihold" {
	file=$BATS_TEST_TMPDIR/kubelet.yaml
	echo 'kind: KubeletConfiguration' >"$file"
	run ! ocihold check --kubelet-config "$file"
	[[ $output == *"it asks CRI-O for images"*"fix: set imageServiceEndpoint: unix://$NODE_DIR/run/ocihold/image.sock in $file"* ]]
	echo "imageServiceEndpoint: unix://$NODE_DIR/run/crio.sock" >>"$file"
	run ! ocihold check --kubelet-config "$file"
	[[ $output == *"it asks unix://$NODE_DIR/run/crio.sock for images"* ]]
	echo "imageServiceEndpoint: $IMAGE_SERVICE_ENDPOINT" >"$file"
	run -0 ocihold check --kubelet-config "$file"
	[[ $output == *"it asks ocihold for images"* ]]
}

@test "a handler is not taken out while something needs its root" {
	ocihold pull --handler vm "$IMAGE" 2>/dev/null
	POD_HANDLER=vm pod_run needs-vm
	BASE_IMAGE=$IMAGE container_run needs-vm main
	cp "$OCIHOLD_CONFIG" "$BATS_TEST_TMPDIR/o.toml"
	sed -i '/^\[handlers.vm\]/,/^$/d' "$OCIHOLD_CONFIG"
	run ! ocihold config crio --write
	[[ $output == *"the root $VM_ROOT cannot be taken out while something needs it"*"container "*main*needs-vm* ]]
	run -0 grep -F "$VM_ROOT" "$DROP_IN"

	# Its image in CRI-O's root, by CRI-O's own pull, leans on the handler's.
	pods_remove
	crictl -i "$CONTAINER_RUNTIME_ENDPOINT" pull "$IMAGE"
	run ! ocihold config crio --write
	[[ $output == *"image $IMAGE in CRI-O's root"* ]]
	cp "$OCIHOLD_CONFIG" "$BATS_TEST_TMPDIR/without.toml"
	cp "$BATS_TEST_TMPDIR/o.toml" "$OCIHOLD_CONFIG"
	run -0 found images
	[[ $output == *"image $IMAGE in CRI-O's root leans on layers in the roots of vm"* ]]
	fix=${output#*FIX }
	eval "$fix" 2>/dev/null
	run -0 ocihold check
	[[ $output == *"image $IMAGE is in the roots of default, vm: CRI-O runs it from its own"* ]]

	cp "$BATS_TEST_TMPDIR/without.toml" "$OCIHOLD_CONFIG"
	run -0 ocihold config crio --write
	[[ $output == *"Restart CRI-O"* ]]
	run ! grep -F "$VM_ROOT" "$DROP_IN"
	restart crio ocihold
	retry 30 ocihold check
	run -0 crictl inspecti "$IMAGE"

	cp "$BATS_TEST_TMPDIR/o.toml" "$OCIHOLD_CONFIG"
	run -0 ocihold config crio --write
	restart crio ocihold
	retry 30 ocihold check
}

@test "handlers that do not go together are refused" {
	printf '[handlers.more]\nroot = "%s/more"\n[[routes]]\nimage = "a"\nhandler = "kata"\n' "$VM_ROOT" >"$OCIHOLD_CONFIG.d/more.toml"
	run ! ocihold config crio
	[[ $output == *"the root of handler more, $VM_ROOT/more, is inside the root of handler vm, $VM_ROOT: "* ]]
	[[ $output == *'routes[0].handler = "kata": there is no such handler: use one of '* ]]
	run -0 found handlers
	printf '[handlers.more]\nroot = "%s/lib/link"\n' "$NODE_DIR" >"$OCIHOLD_CONFIG.d/more.toml"
	ln -s "$VM_ROOT" "$NODE_DIR/lib/link"
	run ! ocihold config crio --write
	[[ $output == *"are one directory"* ]]
	rm "$OCIHOLD_CONFIG.d/more.toml" "$NODE_DIR/lib/link"
	run -0 ocihold check
}
